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

MAX_SECONDS = 900
SHORT_ROUNDS = ["--trainer.limit_train_batches=2", "--federation.reporting.table=true", *QUIET]
RESUME_LINE = "Go on:   the same command with --ckpt_path last"


def start_endless_fit(folder, run, *options):
    """Start a fit in a process of its own, which writes into the folder. ``run`` is called with the command."""
    config = write_config(folder / "federation.yaml")
    command = ["fit", "--config", str(config), *SHORT_ROUNDS, *options]
    endless = "--trainer.max_epochs=100000"
    return Forked(folder, run, *command, endless, PYTHONPATH=IMPORT_PATH)


def terminate_after_first_checkpoint(process):
    """Send SIGTERM to this process alone, and return its status and output."""
    folder = process.output.parent
    try:
        end = time.monotonic() + MAX_SECONDS
        while not list(folder.glob("lightning_logs/*/checkpoints/last.ckpt")):
            status, output = process.wait(0.1)
            assert status is None, output
            assert time.monotonic() < end, output

        os.kill(process.pid, signal.SIGTERM)
        return process.wait(MAX_SECONDS)
    finally:
        if process.status is None:
            os.killpg(process.pid, signal.SIGKILL)


def test_terminated_fit_on_two_ranks_prints_one_table_and_the_command_to_resume(tmp_path):
    two_ranks = ["--trainer.strategy=federated", "--trainer.devices=2"]
    process = start_endless_fit(tmp_path, run_command, *two_ranks)

    status, output = terminate_after_first_checkpoint(process)

    assert status == 128 + signal.SIGTERM, output
    assert output.count("Contributions") == 1
    assert "Traceback" not in output
    assert RESUME_LINE in output


def fit_by_torchrun(*words):
    elastic_launch(AGENT, run_command)(*words)


def last_round_in_table(run_folder):
    *_, last_row = (run_folder / "contributions.csv").read_text().splitlines()
    round_index, _, _ = last_row.partition(",")
    return int(round_index)


def test_terminated_fit_of_torchrun_can_be_resumed(tmp_path):
    process = start_endless_fit(tmp_path, fit_by_torchrun)

    status, output = terminate_after_first_checkpoint(process)

    # It does not depend on what has ended the processes.
    status_of_torchrun = 1
    assert status == status_of_torchrun, output
    assert output.count("Contributions") == 1
    assert RESUME_LINE in output

    run_folder = tmp_path / "lightning_logs" / "version_0"
    num_rounds = last_round_in_table(run_folder) + 3
    config = str(tmp_path / "federation.yaml")
    command = ["fit", "--config", config, *SHORT_ROUNDS, f"--trainer.max_epochs={num_rounds}"]
    process = Forked(tmp_path, run_command, *command, "--ckpt_path", "last")
    status, output = process.wait()

    assert status == 0, output
    assert f"Resuming from {run_folder / 'checkpoints'}" in output
    resumed_run = run_folder.with_name("version_1")
    assert last_round_in_table(resumed_run) == num_rounds - 1


def receive_in_del_method(signal_number):
    """Python prints an exception that is raised in ``__del__``, and goes on."""

    class ObjectThatReceivesASignalInDel:
        def __del__(self):
            signal.raise_signal(signal_number)

    ObjectThatReceivesASignalInDel()


@pytest.fixture
def handler_of_terminal():
    """Python's handler of Ctrl-C, which a process has not got that a shell has started in the background."""
    previous_handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, previous_handler)


@pytest.mark.usefixtures("handler_of_terminal")
@pytest.mark.parametrize("receive", [signal.raise_signal, receive_in_del_method])
@pytest.mark.parametrize(
    ("signal_number", "error"),
    [(signal.SIGTERM, Terminated), (signal.SIGINT, KeyboardInterrupt)],
)
def test_signal_stops_a_command_even_if_received_in_a_del_method(receive, signal_number, error):
    def receive_and_sleep():
        with terminable():
            receive(signal_number)
            time.sleep(30)

    with pytest.raises(error):
        receive_and_sleep()


def test_signal_that_was_lost_is_not_sent_again_after_the_command():
    received_signals = list[int]()

    def record_signal(signal_number, frame):
        received_signals.append(signal_number)

    seconds_until_sent_again = 0.1
    previous_handler = signal.signal(signal.SIGTERM, record_signal)
    try:
        with terminable():
            receive_in_del_method(signal.SIGTERM)
        time.sleep(3 * seconds_until_sent_again)
    finally:
        signal.signal(signal.SIGTERM, previous_handler)

    assert received_signals == []
