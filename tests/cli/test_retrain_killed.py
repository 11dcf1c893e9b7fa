"""``flsv retrain`` killed while its children train: nothing is left running, and the result is that of one go."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from helpers.runs import written

pytestmark = pytest.mark.slow

RETRAIN = ["retrain", "lightning_logs/version_0", "--trainings", "all", "--jobs", "2"]
SECONDS = 900


def begun(folder: Path, *arguments: str, **environment: str) -> "subprocess.Popen[str]":
    """A command that runs in a session of its own; its module counts its steps in its class."""
    path = os.pathsep.join(filter(None, sys.path))
    return subprocess.Popen(
        [sys.executable, "-m", "flsv", *arguments], cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, start_new_session=True, env={**os.environ, "PYTHONPATH": path, "COUNTS": "yes", **environment},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip


def processes(session: int) -> list[int]:
    """The processes of a session that have not ended."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            state = (process / "stat").read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue
        if int(state[3]) == session and state[0] != "Z":
            found.append(int(process.name))
    return found


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run and its values, in one go."""
    folder = tmp_path_factory.mktemp("whole")
    model: dict[str, Any] = {"class_path": "helpers.coalition_kinds.DigitsFails"}
    trainer = {"max_epochs": 2, "accelerator": "cpu", "enable_progress_bar": False, "enable_model_summary": False}
    federation = {"reporting": {"table": False, "figures": 0}}
    config = written(folder / "fed.yaml", model=model, trainer=trainer, federation=federation, seed_everything=3)
    for arguments in (["fit", "--config", str(config)], RETRAIN):
        process = begun(folder, *arguments)
        said, _ = process.communicate(timeout=SECONDS)
        assert process.returncode == 0, said
    return folder


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL], ids=lambda number: number.name)
def test_killed_retrain_ends_children_and_keeps_finished_trainings(whole: Path, tmp_path: Path, number: int) -> None:
    shutil.copytree(whole / "lightning_logs", tmp_path / "lightning_logs")
    run = tmp_path / "lightning_logs" / "version_0"
    file = run / "retrained_scores.csv"
    for each in run.glob("retrained*"):
        each.unlink()
    process = begun(tmp_path, *RETRAIN, WAITS="0.05")
    end = time.monotonic() + SECONDS
    while not (file.is_file() and len(file.read_text().splitlines()) >= 5 and len(processes(process.pid)) == 3):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end
        time.sleep(0.02)
    os.kill(process.pid, number)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == (-number if number == signal.SIGKILL else 128 + number), said
    assert ("stopped. Finished work is kept" in said) is (number != signal.SIGKILL)
    end = time.monotonic() + 10
    while processes(process.pid) and time.monotonic() < end:
        time.sleep(0.02)
    assert processes(process.pid) == []
    assert 3 <= len(file.read_text().splitlines()) - 2 < 8
    again = begun(tmp_path, *RETRAIN)
    said, _ = again.communicate(timeout=SECONDS)
    assert again.returncode == 0, said
    for name in ("retrained.csv", "retrained_scores.csv"):
        assert (run / name).read_bytes() == (whole / "lightning_logs" / "version_0" / name).read_bytes()
