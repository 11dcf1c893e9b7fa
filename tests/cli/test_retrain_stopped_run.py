"""``flsv retrain`` of a run that ended before its last planned round, and of data that lie elsewhere."""

import shutil

import pytest

from flsv.cli import main
from flsv.cli.retrain_saved_run import retrain
from flsv.results.folder import repeated_folders
from flsv.results.record import read_record
from helpers.retrained import retrained_values
from helpers.runs import fit_by_command, read_output, read_rows, write_config

REPORTING = {"table": False, "figures": 0}
ONE_CYCLE = {"class_path": "zoo.configured.DigitsOneCycle"}
QUICKLY = ["--trainings", "singles", "--seeds", "1"]


def early_stopping():
    """Return early stopping by a value that never improves."""
    arguments = {"monitor": "val_loss", "min_delta": 100.0, "patience": 1}
    return {"class_path": "EarlyStopping", "init_args": arguments}


@pytest.fixture(scope="module")
def stopped_run(tmp_path_factory):
    """A run of two of seven rounds, whose learning rates depend on the planned rounds."""
    folder = tmp_path_factory.mktemp("stopped")
    trainer = {"max_epochs": 7, "accelerator": "cpu", "callbacks": [early_stopping()]}
    shadow = {"class_path": "ShadowShapley", "init_args": {"coalitions": "singles"}}
    config = write_config(
        folder / "federation.yaml",
        seed_everything=3,
        model=ONE_CYCLE,
        trainer=trainer,
        federation={"metrics": {"shadow": shadow}, "reporting": REPORTING},
    )
    run = fit_by_command(folder, config)

    # The second round is no better than the first, which is the patience of early_stopping.
    assert read_record(run / "run.json")["rounds_done"] == 2

    return run


@pytest.mark.slow
def test_rounds_of_a_stopped_run_are_trained_and_compared(stopped_run, capsys):
    shutil.rmtree(stopped_run / "coalitions")  # so that they are trained
    assert main(["retrain", str(stopped_run), *QUICKLY]) == 0

    output = read_output(capsys)
    assert "2 of 7 rounds" in output
    assert "not compared" not in output

    last_round = "1"  # the second
    last_values = []
    for row in read_rows(stopped_run / "contributions.csv"):
        if row["metric"] == "shadow" and row["round"] == last_round:
            last_values.append(float(row["value"]))
    assert retrained_values(stopped_run) == pytest.approx(last_values, abs=1e-6)


@pytest.mark.slow
def test_more_rounds_than_a_stopped_run_had_are_trained_if_asked_for(stopped_run):
    shutil.rmtree(stopped_run / "retrained", ignore_errors=True)
    retrain(stopped_run, "singles", seeds=1, rounds=3)
    (run,) = repeated_folders(stopped_run / "retrained")
    assert read_record(run / "run.json")["rounds_done"] == 3
