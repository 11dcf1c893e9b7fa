"""Runs killed while their coalitions train, also inside the writing of a file: resumed and retrained, they have the
table and the values of a run in one go."""

import os
import shutil
import signal
from pathlib import Path

import pytest

from flsv import ClassifierClient
from flsv.cli import main
from helpers.forked import Forked
from helpers.runs import read_rows, write_config_of_two_rounds

pytestmark = pytest.mark.slow

CONFIG = "federation.yaml"
FIT = ["fit", "--config", CONFIG]
RESUME = [*FIT, "--ckpt_path", "last"]
#: Files of the coalition without clients, and of the run's model after each of two rounds.
NUM_FILES_OF_RUN = 3


def kill_in_step(number):
    """Kill this process in a coalition's training step of this number, over all coalitions."""
    train = ClassifierClient.training_step
    folder = Path.cwd()  # coalitions train in another
    steps_of_coalitions = []

    def train_or_kill(module, batch, batch_idx):
        files = [*folder.rglob("coalitions/*/*.pt")]
        if len(files) >= NUM_FILES_OF_RUN:
            steps_of_coalitions.append(batch_idx)
        if len(steps_of_coalitions) == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return train(module, batch, batch_idx)

    ClassifierClient.training_step = train_or_kill


def kill_in_writing(pattern, number=1, share=0.5):
    """Kill this process when this share of a file is written, of the file of this number among those of a pattern.
    None: when the file is at its place.
    """
    replace = os.replace
    replaced_files = []

    def replace_or_kill(draft, path, **options):
        if Path(path).match(pattern):
            replaced_files.append(path)
        is_last = len(replaced_files) == number
        if is_last and share is None:
            replace(draft, path, **options)
        elif is_last:
            os.truncate(draft, int(share * os.path.getsize(draft)))
        if is_last:
            os.kill(os.getpid(), signal.SIGKILL)
        replace(draft, path, **options)

    os.replace = replace_or_kill


COALITION = "coalitions/*/*.pt"
#: The function that arranges a kill, and its arguments. Each of six coalitions has a file.
MOMENTS = {
    "first step": (kill_in_step, 1),
    "first coalition, nothing written": (kill_in_writing, COALITION, NUM_FILES_OF_RUN + 1, 0),
    "first coalition, half written": (kill_in_writing, COALITION, NUM_FILES_OF_RUN + 1),
    "last coalition, moved": (kill_in_writing, COALITION, NUM_FILES_OF_RUN + 6, None),
    "table, half written": (kill_in_writing, "coalitions.csv"),
    "values of samples, half written": (kill_in_writing, "case_values.pt"),
}


def fit_and_kill(arrange_kill, *arguments):
    arrange_kill(*arguments)
    return main(FIT)


def newest_run_in(folder):
    def version(run):
        return int(run.name.removeprefix("version_"))

    return max((folder / "lightning_logs").iterdir(), key=version)


def retrain_newest_run():
    run = newest_run_in(Path())
    return main(["retrain", str(run), "--seeds", "1"])


def resume_and_retrain():
    return main(RESUME) or retrain_newest_run()


def run_in(folder, function, *arguments):
    process = Forked(folder, function, *arguments)
    return process.wait()


def results_in(folder):
    """The tables of coalitions of a run and of its retraining, its values, and their means by retraining."""
    run = newest_run_in(folder)
    rows = read_rows(run / "contributions.csv")
    return {
        "tables": [path.read_text() for path in sorted(run.rglob("coalitions.csv"))],
        "values": [row for row in rows if row["metric"] == "shadow"],
        "means": (run / "retrained" / "repeat.csv").read_text(),
    }


@pytest.fixture(scope="module")
def prepared_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("prepared")
    shadow = {"class_path": "ShadowShapley", "init_args": {"coalitions": "both"}}
    write_config_of_two_rounds(folder / CONFIG, {"shadow": shadow})
    return folder


@pytest.fixture(scope="module")
def expected_results(prepared_folder, tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole") / "run"
    shutil.copytree(prepared_folder, folder)
    for function in (lambda: main(FIT), retrain_newest_run):
        status, output = run_in(folder, function)
        assert status == 0, output
    return results_in(folder)


@pytest.mark.parametrize("moment", MOMENTS)
def test_killed_run_resumes_and_retrains_to_the_table_and_the_values_of_one_go(
    prepared_folder, expected_results, tmp_path, moment
):
    folder = tmp_path / "run"
    shutil.copytree(prepared_folder, folder)

    status, output = run_in(folder, fit_and_kill, *MOMENTS[moment])
    assert status == -signal.SIGKILL, output
    status, output = run_in(folder, resume_and_retrain)

    assert status == 0, output
    assert len(expected_results["tables"]) == 2
    assert results_in(folder) == expected_results
