"""Runs killed while files of their coalitions are written have, resumed and retrained, the results of a whole run."""

import os
import shutil
import signal
from pathlib import Path

import pytest

from flsv.cli import main
from helpers.forked import Forked
from helpers.runs import read_rows, write_config_of_two_rounds

pytestmark = pytest.mark.slow

CONFIG = "federation.yaml"
FIT = ["fit", "--config", CONFIG]
RESUME = [*FIT, "--ckpt_path", "last"]


class ReplaceThatKills:
    """In the place of ``os.replace``: kills its process at one of the files whose paths match a pattern, when the file
    is half written or, if ``is_moved``, at its place."""

    def __init__(self, pattern, file_number, is_moved):
        self.pattern = pattern
        self.file_number = file_number
        self.is_moved = is_moved
        self.num_matches = 0
        self.replace = os.replace

    def __call__(self, draft, path, **options):
        if Path(path).match(self.pattern):
            self.num_matches += 1
        is_last_call = self.num_matches == self.file_number

        if is_last_call and not self.is_moved:
            half_size = os.path.getsize(draft) // 2
            os.truncate(draft, half_size)
        else:
            self.replace(draft, path, **options)
        if is_last_call:
            os.kill(os.getpid(), signal.SIGKILL)


FILES_OF_COALITIONS = "coalitions/*/*.pt"
#: Of the coalition without clients, and of the run's model after each of two rounds.
NUM_FILES_OF_RUN = 3
NUM_FILES_OF_COALITIONS = 6


def fit_and_kill(replace_that_kills):
    os.replace = replace_that_kills
    return main(FIT)


def version_of(run):
    return int(run.name.removeprefix("version_"))


def newest_run_in(folder):
    return max((folder / "lightning_logs").iterdir(), key=version_of)


def retrain_newest_run():
    run = newest_run_in(Path())
    return main(["retrain", str(run), "--seeds", "1"])


def fit_and_retrain(fit_command=FIT):
    """Return a status of 0 if both commands do."""
    return main(fit_command) or retrain_newest_run()


def run_in_fork(folder, function, *arguments):
    return Forked(folder, function, *arguments).wait()


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
    status, output = run_in_fork(folder, fit_and_retrain)
    assert status == 0, output
    return results_in(folder)


@pytest.mark.by_turn
@pytest.mark.parametrize(
    ("pattern", "file_number", "is_moved"),
    [
        (FILES_OF_COALITIONS, NUM_FILES_OF_RUN + 1, False),
        (FILES_OF_COALITIONS, NUM_FILES_OF_RUN + NUM_FILES_OF_COALITIONS, True),
        ("case_values.pt", 1, False),
    ],
    ids=["first coalition half written", "last coalition moved", "values of samples half written"],
)
def test_killed_run_resumes_and_retrains_to_the_results_of_one_go(
    prepared_folder, expected_results, tmp_path, pattern, file_number, is_moved
):
    folder = tmp_path / "run"
    shutil.copytree(prepared_folder, folder)
    replace_that_kills = ReplaceThatKills(pattern, file_number, is_moved)

    status_of_fit, output = run_in_fork(folder, fit_and_kill, replace_that_kills)
    assert status_of_fit == -signal.SIGKILL, output
    status_of_rest, output = run_in_fork(folder, fit_and_retrain, RESUME)

    assert status_of_rest == 0, output
    # A table of the run, and one of its retraining.
    assert len(expected_results["tables"]) == 2
    assert results_in(folder) == expected_results
