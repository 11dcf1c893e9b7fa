"""A command that is stopped by Ctrl-C, or by SIGTERM as systemd, SLURM and torchrun send it."""

import os
import signal
import time

import pytest
from engines.ranks import AGENT, IMPORT_PATH, run_command
from torch.distributed.launcher.api import elastic_launch

from flsv.cli.command import Terminated, terminable
from helpers.forked import Forked
from helpers.runs import QUIET, write_config

pytestmark = pytest.mark.slow

RANKS = ["--trainer.strategy=federated", "--trainer.devices=2"]

SECONDS = 900


def run_by_torchrun(*words):
    elastic_launch(AGENT, run_command)(*words)


def stop_command(process, pattern_of_begun_file):
    """The status and output of a process that gets SIGTERM, this process alone, once it has written a file."""
    folder = process.output.parent
    try:
        end = time.monotonic() + SECONDS
        while not list(folder.glob(pattern_of_begun_file)):
            status, output = process.wait(0.1)
            assert status is None, output
            assert time.monotonic() < end, output

        os.kill(process.pid, signal.SIGTERM)
        return process.wait(SECONDS)
    finally:
        if process.status is None:
            os.killpg(process.pid, signal.SIGKILL)


@pytest.mark.parametrize(
    ("run", "trainer_options", "expected_status"),
    [
        pytest.param(run_command, RANKS, 143, id="two ranks"),
        # torchrun's own status is 1 whatever it is of.
        pytest.param(run_by_torchrun, [], 1, id="torchrun"),
    ],
)
def test_stopped_fit_prints_its_table_and_the_command_to_resume(
    run, trainer_options, expected_status, tmp_path
):
    short = ["--trainer.limit_train_batches=2", "--federation.reporting.table=true"]
    config = write_config(tmp_path / "federation.yaml")
    command = ["fit", "--config", str(config), *short, *QUIET, *trainer_options]
    endless = "--trainer.max_epochs=100000"

    process = Forked(tmp_path, run, *command, endless, PYTHONPATH=IMPORT_PATH)
    status, output = stop_command(process, "lightning_logs/*/checkpoints/last.ckpt")

    assert status == expected_status, output
    assert output.count("Contributions") == 1
    if run is not run_by_torchrun:  # which prints one of its own
        assert "Traceback" not in output
    assert "Go on:   the same command with --ckpt_path last" in output

    run_folder = tmp_path / "lightning_logs" / "version_0"
    rounds = last_round(run_folder) + 3  # two or three more
    resume = [*command, "--ckpt_path", "last", f"--trainer.max_epochs={rounds}"]
    status, output = Forked(tmp_path, run_command, *resume, PYTHONPATH=IMPORT_PATH).wait()

    assert status == 0, output
    assert f"Resuming from {run_folder / 'checkpoints'}" in output


def last_round(run_folder):
    """The round of the table's last row."""
    *_, last_row = (run_folder / "contributions.csv").read_text().splitlines()
    round_index, _, _ = last_row.partition(",")
    return int(round_index)


def receive_within_a_del_method(number):
    """Where Python prints what is raised, and goes on."""

    class Dies:
        def __del__(self):
            signal.raise_signal(number)

    Dies()


@pytest.mark.parametrize("receive", [signal.raise_signal, receive_within_a_del_method])
@pytest.mark.parametrize(
    ("number", "error"),
    [(signal.SIGTERM, Terminated), (signal.SIGINT, KeyboardInterrupt)],
)
def test_signal_stops_a_command_even_if_received_within_a_del_method(receive, number, error):
    """What is raised within a ``__del__`` is lost; a second signal in the same moment is none."""

    def receive_and_sleep():
        with terminable():
            receive(number)
            time.sleep(30)

    with pytest.raises(error):
        receive_and_sleep()


def test_signal_that_was_lost_is_not_sent_again_after_the_command():
    received = list[int]()
    previous_handler = signal.signal(signal.SIGTERM, lambda number, frame: received.append(number))
    try:
        with terminable():
            receive_within_a_del_method(signal.SIGTERM)
        time.sleep(0.3)  # it would come after 0.1 seconds
    finally:
        signal.signal(signal.SIGTERM, previous_handler)

    assert received == []
