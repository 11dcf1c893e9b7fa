"""A command that is stopped by Ctrl-C, or by SIGTERM as systemd, SLURM and torchrun send it."""

import os
import signal
import threading
import time
from collections import deque

import lightning as L
import pytest
from engines.ranks import AGENT, IMPORT_PATH, run_command
from lightning.pytorch.loggers.logger import DummyLogger
from torch.distributed.launcher.api import elastic_launch

from helpers.fits import StopInRound, fit, make_loop_of_three_clients
from helpers.forked import Forked
from helpers.runs import QUIET, write_config

pytestmark = pytest.mark.slow

MAX_SECONDS = 900
# TensorBoard's writer looks for values after 120 seconds, if nobody wakes it.
MAX_SECONDS_TO_END = 90
SHORT_ROUNDS = ["--trainer.limit_train_batches=2", "--federation.reporting.table=true", *QUIET]
RESUME_LINE = "Go on:   the same command with --ckpt_path last"


def start_endless_fit(folder, run, *options, **environment):
    """Start a fit in a process of its own, which writes into the folder. ``run`` is called with the command."""
    config = write_config(folder / "federation.yaml")
    command = ["fit", "--config", str(config), *SHORT_ROUNDS, *options]
    endless = "--trainer.max_epochs=100000"
    return Forked(folder, run, *command, endless, PYTHONPATH=IMPORT_PATH, **environment)


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


class InterruptedWaiters(deque):
    """The readers that wait for a queue. The process gets a signal after one was woken, before it is struck off."""

    def __init__(self, waiters, signal_number):
        super().__init__(waiters)
        self.signal_number = signal_number

    def remove(self, waiter):
        signal.raise_signal(self.signal_number)
        super().remove(waiter)


class InterruptsTensorBoard(L.Callback):
    """Sends the signal ``FLSV_TEST_SIGNAL`` in the second round, while a value is put into TensorBoard's queue."""

    def on_train_batch_start(self, trainer, *_):
        if trainer.current_epoch == 1:
            interrupt_next_value(trainer.logger, int(os.environ["FLSV_TEST_SIGNAL"]))


def interrupt_next_value(logger, signal_number):
    writer = logger.experiment._get_file_writer().event_writer._async_writer
    condition = writer._byte_queue.not_empty
    while not condition._waiters:
        time.sleep(0.001)

    condition._waiters = InterruptedWaiters(condition._waiters, signal_number)
    logger.log_metrics({"any": 1.0}, step=0)


@pytest.mark.parametrize("signal_number", [signal.SIGTERM, signal.SIGINT])
def test_signal_while_a_value_is_given_to_tensorboard_ends_the_fit(tmp_path, signal_number):
    callback = "--trainer.callbacks=cli.test_stopped.InterruptsTensorBoard"
    process = start_endless_fit(
        tmp_path, run_command, callback, FLSV_TEST_SIGNAL=str(int(signal_number))
    )
    status, output = process.wait(MAX_SECONDS_TO_END)

    if status is None:
        os.killpg(process.pid, signal.SIGKILL)
    assert status == 128 + signal_number, output
    assert RESUME_LINE in output


def test_logger_that_hangs_is_left_after_some_seconds(tmp_path, monkeypatch):
    class HangingLogger(DummyLogger):
        def finalize(self, status):
            has_ended.wait(30)

    monkeypatch.setattr("flsv._lightning.patches.MAX_SECONDS_TO_CLOSE", 0.05)
    has_ended = threading.Event()
    logger = HangingLogger()
    interrupt = StopInRound(round_index=1, batch=0, error=KeyboardInterrupt)
    start_time = time.monotonic()

    with pytest.raises(SystemExit), pytest.warns(match="HangingLogger was not closed within"):
        fit(make_loop_of_three_clients(), tmp_path, logger=logger, callbacks=[interrupt])

    assert time.monotonic() - start_time < 30
    assert "finalize" not in vars(logger)
    has_ended.set()
