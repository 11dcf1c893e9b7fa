"""``flsv retrain`` that a signal ends while its children train: they end, too, and the result is that of one go."""

import os
import shutil
import signal
import time
from pathlib import Path

import pytest

from flsv.cli import main
from helpers.forked import Forked, processes
from helpers.retrained import stored_coalitions
from helpers.runs import write_config_of_two_rounds

pytestmark = pytest.mark.slow

RUN = Path("lightning_logs/version_0")
SUMMARY = RUN / "retrained" / "repeat.csv"
RETRAIN = ["retrain", str(RUN), "--trainings", "all", "--seeds", "1", "--jobs", "2"]
NUM_COALITIONS = 6


def start_command(folder, *arguments, **environment):
    return Forked(folder, main, [*arguments], **environment)


def run_command(folder, *arguments):
    status, output = start_command(folder, *arguments).wait()
    assert status == 0, output


@pytest.fixture(scope="module")
def uninterrupted_run(tmp_path_factory):
    """The folder of a run and its retraining."""
    folder = tmp_path_factory.mktemp("whole")
    model = {"class_path": "zoo.configured.DigitsThatWait"}
    config = write_config_of_two_rounds(folder / "fed.yaml", model=model)
    run_command(folder, "fit", "--config", str(config))
    run_command(folder, *RETRAIN)
    return folder


def num_trained_coalitions(run):
    folders = run.glob("retrained/seed_*")
    return sum(len(stored_coalitions(folder)) for folder in folders)


def stop_after_two_coalitions(process, run, signal_number):
    """Send a signal, and return the process's status and output."""
    end = time.monotonic() + 900
    while num_trained_coalitions(run) < 2:
        status, output = process.wait(0.02)
        assert status is None, output
        assert time.monotonic() < end

    os.kill(process.pid, signal_number)
    return process.wait(300)


def assert_all_processes_end(session):
    end = time.monotonic() + 60
    while processes(session) and time.monotonic() < end:
        time.sleep(0.02)
    assert processes(session) == []


@pytest.mark.long
@pytest.mark.parametrize(
    ("signal_number", "expected_status", "num_messages"),
    [(signal.SIGINT, 128 + signal.SIGINT, 1), (signal.SIGKILL, -signal.SIGKILL, 0)],
    ids=["SIGINT", "SIGKILL"],
)
def test_stopped_retrain_ends_children_and_keeps_finished_trainings(
    uninterrupted_run, tmp_path, signal_number, expected_status, num_messages
):
    shutil.copytree(uninterrupted_run / RUN, tmp_path / RUN)
    shutil.rmtree(tmp_path / RUN / "retrained")

    process = start_command(tmp_path, *RETRAIN, WAITS="0.05")
    status, output = stop_after_two_coalitions(process, tmp_path / RUN, signal_number)

    assert status == expected_status, output
    assert output.count("stopped. Finished work is kept") == num_messages
    assert_all_processes_end(process.pid)
    assert 2 <= num_trained_coalitions(tmp_path / RUN) < NUM_COALITIONS

    run_command(tmp_path, *RETRAIN)
    assert (tmp_path / SUMMARY).read_bytes() == (uninterrupted_run / SUMMARY).read_bytes()
