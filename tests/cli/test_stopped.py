"""A command that is stopped by Ctrl-C, or by SIGTERM as systemd, SLURM and torchrun send it."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from torch.distributed.launcher.api import elastic_launch

from flsv.cli.command import Terminated, terminable
from helpers.forked import Forked
from helpers.ranks import AGENT, IMPORT_PATH, run_command
from helpers.runs import QUIET, write_config

pytestmark = pytest.mark.slow

RANKS = ["--trainer.strategy=federated", "--trainer.devices=2"]
STATUS = {signal.SIGINT: 130, signal.SIGTERM: 143}
SECONDS = 900


def torchrun(*words: str) -> None:
    elastic_launch(AGENT, run_command)(*words)


#: What starts a fit; how else its configuration is.
STARTS: dict[str, tuple[Callable[..., None], list[str]]] = {
    "one process": (run_command, []),
    "two ranks": (run_command, RANKS),
    "torchrun": (torchrun, []),
}


def stop_command(process: Forked, number: int, begun: str) -> tuple[int | None, str]:
    """The status and output of a process that gets a signal once it has written a file: SIGTERM this process alone,
    SIGINT all that it has started, too, as from a terminal."""
    folder = process.output.parent
    try:
        end = time.monotonic() + SECONDS
        while not list(folder.glob(begun)):
            assert process.wait(0.1)[0] is None, process.output.read_text()
            assert time.monotonic() < end, process.output.read_text()
        if number == signal.SIGTERM:
            os.kill(process.pid, number)
        else:
            os.killpg(process.pid, number)
        return process.wait(SECONDS)
    finally:
        if process.status is None:
            os.killpg(process.pid, signal.SIGKILL)


@pytest.mark.parametrize(
    ("launch", "number"),
    [
        ("one process", signal.SIGINT),
        ("two ranks", signal.SIGTERM),
        ("torchrun", signal.SIGTERM),
    ],
)
def test_stopped_fit_prints_its_table_and_the_command_to_resume(
    launch: str, number: int, tmp_path: Path
) -> None:
    run_launcher, trainer_options = STARTS[launch]
    short = ["--trainer.limit_train_batches=2", "--federation.reporting.table=true"]
    config = write_config(tmp_path / "federation.yaml")
    options = ["--config", str(config), *short, *QUIET, *trainer_options]
    words = ["fit", *options, "--trainer.max_epochs=100000"]

    process = Forked(tmp_path, run_launcher, *words, PYTHONPATH=IMPORT_PATH)
    status, output = stop_command(process, number, "lightning_logs/*/checkpoints/last.ckpt")

    # torchrun's own status is 1 whatever it is of.
    expected_status = 1 if launch == "torchrun" else STATUS[number]
    assert status == expected_status, output
    assert output.count("Contributions") == 1
    assert "Traceback" not in output or launch == "torchrun"
    assert "Go on:   the same command with --ckpt_path last" in output

    checkpoints = tmp_path / "lightning_logs" / "version_0" / "checkpoints"
    last_row = (checkpoints.parent / "contributions.csv").read_text().splitlines()[-1]
    rounds = int(last_row.split(",")[0]) + 3
    resume = ["fit", *options, "--ckpt_path", "last", f"--trainer.max_epochs={rounds}"]
    status, output = Forked(tmp_path, run_command, *resume, PYTHONPATH=IMPORT_PATH).wait()
    assert status == 0, output
    assert f"Resuming from {checkpoints}" in output


@pytest.mark.parametrize("swallows", [False, True])
def test_sigterm_raises_terminated_even_if_received_within_a_del_method(swallows: bool) -> None:
    """What is raised within a ``__del__`` is lost; a second signal in the same moment is none."""

    class Last:
        def __del__(self) -> None:
            signal.raise_signal(signal.SIGTERM)

    def work() -> None:
        with terminable():
            Last() if swallows else signal.raise_signal(signal.SIGTERM)
            time.sleep(30)

    with pytest.raises(Terminated):
        work()
