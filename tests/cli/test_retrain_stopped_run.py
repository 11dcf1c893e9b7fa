"""``flsv retrain`` of a run that ended before its last planned round, and of data that lie elsewhere."""

import shutil

import pytest

import flsv
from flsv.cli import main
from flsv.cli.retrain_saved_run import retrain
from flsv.results.folder import repeated_folders
from flsv.results.record import read_record
from helpers.retrained import retrained_values
from helpers.runs import fit_by_command, read_output, write_config

REPORTING = {"table": False, "figures": 0}
ONE_CYCLE = {"class_path": "zoo.configured.DigitsOneCycle"}
#: No round is better than the first, which ends the run after the second.
STOPPING = {
    "class_path": "EarlyStopping",
    "init_args": {"monitor": "val_loss", "min_delta": 100.0, "patience": 1},
}


@pytest.fixture(scope="module")
def stopped_run(tmp_path_factory):
    """A run of two of seven rounds, whose learning rates depend on the planned rounds."""
    folder = tmp_path_factory.mktemp("stopped")
    trainer = {"max_epochs": 7, "accelerator": "cpu", "callbacks": [STOPPING]}
    shadow = {"class_path": "ShadowShapley", "init_args": {"coalitions": "singles"}}
    config = write_config(
        folder / "federation.yaml",
        seed_everything=3,
        model=ONE_CYCLE,
        trainer=trainer,
        federation={"metrics": {"shadow": shadow}, "reporting": REPORTING},
    )
    run = fit_by_command(folder, config)
    assert read_record(run / "run.json")["rounds_done"] == 2
    return run


@pytest.fixture
def run_without_coalitions(stopped_run, tmp_path):
    run = shutil.copytree(stopped_run, tmp_path / "run")
    shutil.rmtree(run / "coalitions")
    return run


@pytest.mark.slow
def test_retrain_of_a_stopped_run_trains_as_many_rounds(run_without_coalitions, capsys):
    run = run_without_coalitions

    assert main(["retrain", str(run), "--trainings", "singles", "--seeds", "1"]) == 0

    output = read_output(capsys)
    assert "2 of 7 rounds" in output
    assert "not compared" not in output
    rows = flsv.read_run(run).query("metric == 'shadow' and round == 1")
    assert retrained_values(run) == pytest.approx(rows["value"].tolist(), abs=1e-6)


@pytest.mark.slow
def test_retrain_trains_more_rounds_than_a_stopped_run_if_asked_for(run_without_coalitions):
    retrain(run_without_coalitions, "singles", seeds=1, rounds=3)
    (retrained_run,) = repeated_folders(run_without_coalitions / "retrained")
    assert read_record(retrained_run / "run.json")["rounds_done"] == 3
