"""What a deployment cannot give is refused before any site is asked; and how a run has ended is in a file."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from remote_federation import shapfed

from flsv import ClientEvaluation
from flsv.attacks import MinMax
from flsv.clients.algorithms import ClientAlgorithm
from flsv.engines.remote.federation import check_deployment, run_status
from flsv.errors import ConfigurationError
from flsv.metrics import WassersteinContribution


class OfCounts(ClientAlgorithm):
    """One of a user's, of which nobody has said that it leaves class counts alone."""

    needs_classes = True


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"client_algorithm": OfCounts()}, "works with the clients' class counts"),
        ({"metrics": {"own": WassersteinContribution()}, "aggregator": None}, "asks clients about their samples"),
        ({"evaluation": ClientEvaluation(keep_trained=True)}, "models that sites have trained stay there"),
        ({"uploads": [MinMax(clients=[0, 1])]}, "sites do not see each other's updates"),
    ],
)
def test_settings_are_checked_before_any_site_is_asked(options: dict[str, Any], words: str) -> None:
    loop = shapfed(**options)
    with pytest.raises(ConfigurationError, match=words):
        check_deployment(loop.config, loop.board)


def test_how_a_run_has_ended_is_in_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = partial(lambda path: json.loads(path.read_text()), tmp_path / "status.json")
    with run_status(tmp_path) as say:
        assert said()["status"] == "running"
        say("2 of 3 sites, waiting for Osaka")
        assert (said()["status"], said()["why"]) == ("running", "2 of 3 sites, waiting for Osaka")
    assert (said()["status"], said()["why"]) == ("finished", None)
    assert capsys.readouterr().err.endswith(f"flsv: the run has finished: {tmp_path}.\n")
    with pytest.raises(ValueError, match="too bad"), run_status(tmp_path):
        raise ValueError("too bad")
    assert (said()["status"], said()["why"]) == ("failed", "ValueError: too bad")
    with pytest.raises(SystemExit), run_status(tmp_path):
        raise SystemExit(0)  # as Flower ends an app whose SuperLink is gone
    assert (said()["status"], said()["why"]) == ("running", None)


def test_a_second_server_in_one_folder_leaves_the_first_ones_words_alone(tmp_path: Path) -> None:
    with run_status(tmp_path):
        before = (tmp_path / "status.json").read_bytes()
        with pytest.raises(ConfigurationError, match="another run is writing"), run_status(tmp_path):
            pass
        assert (tmp_path / "status.json").read_bytes() == before
    with run_status(tmp_path):
        pass
