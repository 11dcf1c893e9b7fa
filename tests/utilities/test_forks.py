"""Forks share no position in a file with their parent, and copy no large file that is mapped into memory."""

import gc
import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from flsv.utilities import forks
from flsv.utilities.supervisor import ChildFailed, supervise


def test_parent_waits_until_its_fork_has_files_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "letters"
    path.write_text("abc")
    copy_open_files = forks._copy_open_files

    def copy_late() -> None:
        time.sleep(0.2)
        copy_open_files()

    monkeypatch.setattr(forks, "_copy_open_files", copy_late)
    with path.open("rb", buffering=0) as file:
        child = forks.quiet_fork()
        if child == 0:
            letter = file.read(1)
            os._exit(letter[0])
        file.read(1)
        _, status = os.waitpid(child, 0)

    assert os.waitstatus_to_exitcode(status) == ord("a")


def test_fork_copies_only_what_it_writes_of_a_large_mapped_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    megabyte = 2**20
    monkeypatch.setattr(forks, "_COPIED", 16 * megabyte)
    path = tmp_path / "numbers"
    numbers: Any = np.memmap(path, dtype=np.uint8, mode="w+", shape=96 * megabyte)

    def write() -> tuple[int, int]:
        numbers[0] = 7
        return int(numbers[0]), private_kilobytes()

    answers = dict(supervise([("child", write)]))
    first_number_in_child, kilobytes_of_child = answers["child"]

    assert first_number_in_child == 7
    assert numbers[0] == 0
    assert kilobytes_of_child < 64 * 1024  # the file has 96 megabytes


def private_kilobytes() -> int:
    """Return how much memory only this process has."""
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Private_Dirty:"):
            return int(line.split()[1])
    raise AssertionError("the system does not tell")


def test_fork_has_one_thread_frozen_objects_and_default_signals() -> None:
    num_frozen = gc.get_freeze_count()
    num_threads = torch.get_num_threads()
    torch.set_num_threads(2)

    def state() -> tuple[int, bool, set[Any]]:
        handlers = {signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
        return torch.get_num_threads(), gc.get_freeze_count() > num_frozen, handlers

    try:
        answers = dict(supervise([("child", state)]))
    finally:
        torch.set_num_threads(num_threads)

    threads_of_child, has_frozen_more, handlers_of_child = answers["child"]
    assert threads_of_child == 1
    assert has_frozen_more
    assert handlers_of_child == {signal.SIG_DFL}


def test_fork_whose_parent_has_ended_before_ends_too() -> None:
    pid_of_ended_process = 0

    answers = dict(supervise([("child", lambda: forks.set_up_child(pid_of_ended_process))]))

    failure = answers["child"]
    assert isinstance(failure, ChildFailed)
    assert "ended with status 1 and no answer" in str(failure)
