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


def kill_at_file(pattern, number, is_moved):
    """Kill this process at the file of this number among those of a pattern: half written, or moved to its place."""
    replace = os.replace
    replaced_files = []

    def replace_or_kill(draft, path, **options):
        if Path(path).match(pattern):
            replaced_files.append(path)
        if len(replaced_files) < number:
            return replace(draft, path, **options)

        if is_moved:
            replace(draft, path, **options)
        else:
            os.truncate(draft, os.path.getsize(draft) // 2)
        return os.kill(os.getpid(), signal.SIGKILL)

    os.replace = replace_or_kill


COALITION = "coalitions/*/*.pt"
#: Files of the coalition without clients, and of the run's model after each of two rounds.
NUM_FILES_OF_RUN = 3
NUM_COALITIONS = 6


def fit_and_kill(pattern, number, is_moved):
    kill_at_file(pattern, number, is_moved)
    return main(FIT)


def newest_run_in(folder):
    def version(run):
        return int(run.name.removeprefix("version_"))

    return max((folder / "lightning_logs").iterdir(), key=version)


def retrain_newest_run():
    run = newest_run_in(Path())
    return main(["retrain", str(run), "--seeds", "1"])


def fit_and_retrain():
    return main(FIT) or retrain_newest_run()


def resume_and_retrain():
    return main(RESUME) or retrain_newest_run()


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


@pytest.mark.parametrize(
    ("pattern", "number", "is_moved"),
    [
        (COALITION, NUM_FILES_OF_RUN + 1, False),
        (COALITION, NUM_FILES_OF_RUN + NUM_COALITIONS, True),
        ("case_values.pt", 1, False),
    ],
    ids=["first coalition half written", "last coalition moved", "values of samples half written"],
)
def test_killed_run_resumes_and_retrains_to_the_results_of_one_go(
    prepared_folder, expected_results, tmp_path, pattern, number, is_moved
):
    folder = tmp_path / "run"
    shutil.copytree(prepared_folder, folder)

    status, output = run_in_fork(folder, fit_and_kill, pattern, number, is_moved)
    assert status == -signal.SIGKILL, output
    status, output = run_in_fork(folder, resume_and_retrain)

    assert status == 0, output
    assert len(expected_results["tables"]) == 2
    assert results_in(folder) == expected_results
