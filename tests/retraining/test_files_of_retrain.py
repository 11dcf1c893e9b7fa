"""Files that training writes and reads: trainings of flsv retrain begin without those of the run and of each other."""

from pathlib import Path
from typing import Any

import pytest

import flsv
from flsv import FederatedLoop, Reporting
from flsv.cli import main
from helpers.coalition_kinds import CountsRounds, CountsRoundsInFile
from helpers.coalitions_by_hand import SEED, make_three_clients
from helpers.fits import trainer_for
from helpers.runs import fit_by_command, write_config


def retrain_values(module: Any, folder: Path) -> list[float]:
    loop = FederatedLoop(seed=SEED, reporting=Reporting(table=False))
    trainer = trainer_for(loop, folder, 3)
    rows = flsv.retrain(
        trainer, module, make_three_clients(), "all", metric="negative_loss", seeds=1
    )

    return rows["value"].tolist()


def test_a_coalition_does_not_read_what_another_one_has_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "user"
    folder.mkdir()
    monkeypatch.chdir(folder)
    expected = retrain_values(CountsRounds, tmp_path / "without")

    assert retrain_values(CountsRoundsInFile, tmp_path / "with") == expected
    assert list(folder.iterdir()) == []


def test_flsv_retrain_names_a_file_that_the_run_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "user"
    folder.mkdir()
    monkeypatch.chdir(folder)
    config = write_config(
        tmp_path / "federation.yaml",
        seed_everything=3,
        model={"class_path": "helpers.coalition_kinds.DigitsInFile"},
        trainer={"max_epochs": 3, "accelerator": "cpu"},
        federation={"reporting": {"table": False, "figures": 0}},
    )
    run = fit_by_command(tmp_path, config)

    assert main(["retrain", str(run), "--trainings", "singles", "--seeds", "1"]) == 2

    message = " ".join(capsys.readouterr().err.split())
    assert "rounds.txt', which the run has changed" in message
