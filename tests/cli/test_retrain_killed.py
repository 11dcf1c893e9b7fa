"""``flsv retrain`` killed while its children train: nothing is left running, and the result is that of one go."""

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

RETRAIN = ["retrain", "lightning_logs/version_0", "--trainings", "all"]
RETRAIN += ["--seeds", "1", "--jobs", "2"]


def start_command(folder, *arguments, **environment):
    return Forked(folder, main, [*arguments], **environment)


@pytest.fixture(scope="module")
def uninterrupted_run(tmp_path_factory):
    """A run and its values, in one go."""
    folder = tmp_path_factory.mktemp("whole")
    model = {"class_path": "zoo.configured.DigitsThatWait"}
    config = write_config_of_two_rounds(folder / "fed.yaml", model=model)
    fit = ["fit", "--config", str(config)]
    for arguments in (fit, RETRAIN):
        process = start_command(folder, *arguments)
        status, output = process.wait()
        assert status == 0, output

    return folder


def num_trained_coalitions(run):
    folders = run.glob("retrained/seed_*")
    return sum(len(stored_coalitions(folder)) for folder in folders)


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=lambda number: number.name)
def test_stopped_retrain_ends_children_and_keeps_finished_trainings(
    uninterrupted_run, tmp_path, number
):
    shutil.copytree(uninterrupted_run / "lightning_logs", tmp_path / "lightning_logs")
    run = tmp_path / "lightning_logs" / "version_0"
    shutil.rmtree(run / "retrained")

    process = start_command(tmp_path, *RETRAIN, WAITS="0.05")
    end = time.monotonic() + 900
    while num_trained_coalitions(run) < 2:
        status, output = process.wait(0.02)
        assert status is None, output
        assert time.monotonic() < end

    os.kill(process.pid, number)
    status, output = process.wait(300)

    assert status == (-number if number == signal.SIGKILL else 128 + number), output
    assert ("stopped. Finished work is kept" in output) is (number != signal.SIGKILL)

    end = time.monotonic() + 60
    while processes(process.pid) and time.monotonic() < end:
        time.sleep(0.02)

    assert processes(process.pid) == []
    assert 2 <= num_trained_coalitions(run) < 6

    status, output = start_command(tmp_path, *RETRAIN).wait()
    assert status == 0, output
    summary = Path("lightning_logs/version_0/retrained/repeat.csv")
    assert (tmp_path / summary).read_bytes() == (uninterrupted_run / summary).read_bytes()
