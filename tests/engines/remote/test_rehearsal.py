"""What is wrong with a server's settings is said before any site is asked for anything."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from remote_federation import ServerData, shapfed
from remote_sites import NAMES, module

from flsv import ClientEvaluation
from flsv.clients.algorithms import ClientAlgorithm, InRunValues
from flsv.engines.remote import Directory, RemoteData
from flsv.engines.remote.federation import PLENTY, rehearse, told_status
from flsv.errors import ConfigurationError
from flsv.metrics import (
    ClassSpecificShapley,
    ContributionEstimation,
    DecayedShapley,
    InRunShapley,
    WassersteinContribution,
)
from flsv.personalization import PFedSV


class OfCounts(ClientAlgorithm):
    """One of a user's, of which nobody has said that it leaves class counts alone."""

    needs_classes = True


def acted(folder: Path, own: Any = None, num_classes: int | None = 10, **options: Any) -> None:
    class Nobody:
        def present(self) -> list[int]:
            raise AssertionError("a site was asked for")

        exchange = present

    directory = Directory(Nobody(), NAMES, {}, folder / "book.json")  # type: ignore[arg-type]
    data = RemoteData(NAMES, [PLENTY] * 3, num_classes, own=own)
    rehearse(module(), shapfed(**options), directory, data, {"max_epochs": 2, "accelerator": "cpu"})
    assert not list(folder.iterdir())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"client_algorithm": OfCounts(), "metrics": {"cssv": ClassSpecificShapley()}, "own": ServerData()},
            "works with the clients' class counts",
        ),
        (
            {"metrics": {"cssv": ClassSpecificShapley(), "own": DecayedShapley()}},
            "evaluate models on the server's validation set, which is empty",
        ),
        (
            {"metrics": {"cssv": ClassSpecificShapley(), "own": WassersteinContribution()}},
            "asks clients about their samples",
        ),
        ({"num_classes": None}, "work with classes"),
        ({"evaluation": ClientEvaluation(keep_trained=True)}, "models that sites have trained stay there"),
        ({"personalizer": PFedSV("relevance", k=2)}, "reads the metric 'relevance', which is not defined"),
    ],
)
def test_settings_are_checked_before_any_site_is_asked(tmp_path: Path, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        acted(tmp_path, **options)


def test_what_only_sites_can_tell_is_left_to_them(tmp_path: Path) -> None:
    acted(tmp_path)
    metrics = {"cssv": ClassSpecificShapley(), "own": DecayedShapley(), "fedce": ContributionEstimation()}
    acted(tmp_path, own=ServerData(), metrics=metrics, evaluation=ClientEvaluation(every=1))
    in_run = {"cssv": ClassSpecificShapley(), "own": InRunShapley()}
    acted(tmp_path, own=ServerData(), metrics=in_run, client_algorithm=InRunValues())


def test_how_a_run_has_ended_is_in_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = partial(lambda path: json.loads(path.read_text()), tmp_path / "status.json")
    with told_status(tmp_path):
        assert said()["status"] == "running"
    assert (said()["status"], said()["why"]) == ("finished", None)
    assert capsys.readouterr().err.endswith(f"flsv: the run has finished. See {tmp_path / 'status.json'}.\n")
    with pytest.raises(ValueError, match="too bad"), told_status(tmp_path):
        raise ValueError("too bad")
    assert (said()["status"], said()["why"]) == ("failed", "ValueError: too bad")
    with pytest.raises(SystemExit), told_status(tmp_path):
        raise SystemExit(0)  # as Flower ends an app whose SuperLink is gone
    assert (said()["status"], said()["why"]) == ("stopped", None)


def test_a_second_server_in_one_folder_leaves_the_first_ones_words_alone(tmp_path: Path) -> None:
    with told_status(tmp_path):
        before = (tmp_path / "status.json").read_bytes()
        with pytest.raises(ConfigurationError, match="another run is writing"), told_status(tmp_path):
            pass
        assert (tmp_path / "status.json").read_bytes() == before
    with told_status(tmp_path):
        pass
