"""A file that training writes and reads: flsv retrain has no values, since it reads what the run has written."""

import pytest

from flsv.cli import main
from helpers.runs import fit_by_command, write_config


@pytest.mark.slow
def test_flsv_retrain_has_no_values_if_training_depends_on_a_file_that_the_run_has_changed(
    tmp_path, monkeypatch, capsys
):
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
    assert "there are no values: the run, trained again" in message
    assert "does not follow from configuration and seed" in message
