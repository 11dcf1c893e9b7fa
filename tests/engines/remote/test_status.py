"""What a deployment cannot give is refused before any site is asked; and how a run has ended is in a file."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from remote_federation import shapfed

from flsv import ClientEvaluation
from flsv.aggregation import DivergenceWeighted
from flsv.attacks import MinMax
from flsv.engines.remote.federation import check_deployment, run_status
from flsv.errors import ConfigurationError
from flsv.metrics import ContributionEstimation, WassersteinContribution


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"aggregator": DivergenceWeighted()}, "aggregator DivergenceWeighted.*works with the clients' class counts"),
        ({"metrics": {"own": WassersteinContribution()}, "aggregator": None}, "asks clients about their samples"),
        (
            {"metrics": {"own": ContributionEstimation(performance="val_hits", mode="max")}, "aggregator": None},
            r"measure models by .*'val_hits'.*cannot be sent to them",
        ),
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
    with run_status(tmp_path):
        assert said()["status"] == "running"
    assert (said()["status"], said()["why"]) == ("finished", None)
    assert capsys.readouterr().err.endswith(f"flsv: the run has finished: {tmp_path}.\n")
    with pytest.raises(ValueError, match="too bad"), run_status(tmp_path):
        raise ValueError("too bad")
    assert (said()["status"], said()["why"]) == ("failed", "ValueError: too bad")
    with pytest.raises(SystemExit), run_status(tmp_path):
        raise SystemExit(0)  # as Flower ends an app whose SuperLink is gone
    assert (said()["status"], said()["why"]) == ("running", None)
