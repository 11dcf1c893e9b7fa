"""A command that is stopped by Ctrl-C, or by SIGTERM as systemd, SLURM and torchrun send it."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from flsv.cli import main
from flsv.cli.command import Terminated, terminable
from helpers.forked import Forked
from helpers.runs import QUIET, write_config

pytestmark = pytest.mark.slow

FLSV = [sys.executable, "-m", "flsv"]
TORCHRUN = [
    sys.executable,
    "-m",
    "torch.distributed.run",
    "--standalone",
    "--nproc-per-node",
    "2",
    "-m",
    "flsv",
]
RANKS = ["--trainer.strategy=federated", "--trainer.devices=2"]
#: What starts a fit; how else its configuration is.
STARTS = {"one process": (FLSV, []), "two ranks": (FLSV, RANKS), "torchrun": (TORCHRUN, [])}
STATUS = {signal.SIGINT: 130, signal.SIGTERM: 143}
SECONDS = 900


def stop_command(command: list[str], folder: Path, number: int, begun: str) -> tuple[int, str]:
    """The status and output of a command that gets a signal once it has written a file: SIGTERM its first process
    alone, SIGINT all of them, as from a terminal."""
    output = folder / "output.txt"
    with output.open("w") as file:
        process = subprocess.Popen(
            command, stdout=file, stderr=file, cwd=folder, start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )  # fmt: skip

    try:
        end = time.monotonic() + SECONDS
        while not list(folder.glob(begun)):
            assert process.poll() is None, output.read_text()
            assert time.monotonic() < end, output.read_text()
            time.sleep(0.1)
        (os.kill if number == signal.SIGTERM else os.killpg)(process.pid, number)
        return process.wait(SECONDS), output.read_text()
    finally:
        if process.poll() is None:
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
    launcher, trainer_options = STARTS[launch]
    short = ["--trainer.limit_train_batches=2", "--federation.reporting.table=true"]
    config = write_config(tmp_path / "federation.yaml")
    options = ["--config", str(config), *short, *QUIET, *trainer_options]
    command = [*launcher, "fit", *options, "--trainer.max_epochs=100000"]

    status, output = stop_command(
        command, tmp_path, number, "lightning_logs/*/checkpoints/last.ckpt"
    )

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
    if launch == "two ranks":  # which it starts
        process = subprocess.run(
            [*FLSV, *resume],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=SECONDS,
        )
        status = process.returncode
        output = process.stdout + process.stderr
    else:
        status, output = Forked(tmp_path, main, resume).wait()

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
