"""Forks share no position in a file with their parent, and copy no large file that is mapped into memory."""

import gc
import os
import signal
import subprocess
import sys
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


def test_fork_that_ctrl_c_interrupts_leaves_no_child(monkeypatch: pytest.MonkeyPatch) -> None:
    fork = os.fork
    children = list[int]()

    def fork_and_note_the_child() -> int:
        child = fork()
        children.append(child)
        return child

    def interrupt(descriptor: int, size: int) -> bytes:
        raise KeyboardInterrupt

    def fork_and_let_the_child_sleep() -> None:
        if forks.quiet_fork() == 0:
            time.sleep(60)
            os._exit(0)

    monkeypatch.setattr(os, "fork", fork_and_note_the_child)
    monkeypatch.setattr(os, "read", interrupt)
    with pytest.raises(KeyboardInterrupt):
        fork_and_let_the_child_sleep()

    with pytest.raises(ChildProcessError):  # it was killed, and waited for
        os.waitpid(children[0], 0)


#: A process whose main thread sleeps, while another starts a process that waits for a pipe's writer.
WAITS_IN_A_THREAD = """
import os, sys, threading, time
pipe = sys.argv[1]
open_pipe = (os.POSIX_SPAWN_OPEN, 0, pipe, os.O_RDONLY, 0)
def start():
    os.posix_spawn("/bin/true", ["true"], {}, file_actions=[open_pipe])
threading.Thread(target=start).start()
time.sleep(600)
"""


def states_of_threads(pid: int) -> list[str]:
    states = []
    for path in Path(f"/proc/{pid}/task").glob("*/stat"):
        _, _, text_after_name = path.read_text().rpartition(") ")
        states.append(text_after_name[0])
    return sorted(states)


def test_process_with_a_thread_that_waits_for_the_system_does_not_sleep(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    command = [sys.executable, "-c", WAITS_IN_A_THREAD, str(pipe)]
    process = subprocess.Popen(command, start_new_session=True)
    try:
        # "D" is a sleep that no signal ends, as that of a thread that waits for a disk.
        while states_of_threads(process.pid) != ["D", "S"]:
            assert process.poll() is None
            time.sleep(0.01)
        assert forks.cpu_times_while_asleep(process.pid) is None

        pipe.open("w").close()
        while states_of_threads(process.pid) != ["S"]:
            assert process.poll() is None
            time.sleep(0.01)
        assert forks.cpu_times_while_asleep(process.pid) is not None
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def test_fork_copies_only_what_it_writes_of_a_large_mapped_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    megabyte = 2**20
    monkeypatch.setattr(forks, "_LARGEST_COPY_BYTES", 16 * megabyte)
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
