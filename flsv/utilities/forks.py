"""Functions that fork this process. A fork has a copy of its memory, and ends with it."""

from __future__ import annotations

import ctypes
import gc
import mmap
import multiprocessing
import os
import random
import signal
import sys
import threading
import warnings
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import torch

#: The C library, or None where a process cannot be forked.
LIBC = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None
_SET_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG
_MAP_FIXED = 0x10  # of sys/mman.h, which Python's mmap lacks
#: Mapped files of more bytes are not copied at a fork, but mapped anew.
_LARGEST_COPY_BYTES = 2**28
#: Beginnings of the paths of memory that belongs to a graphics card's driver.
_DEVICE_PATHS = ("/dev/dri", "/dev/nvidia")
#: Classes of threads that may run at a fork, since they hold no lock that a child needs: TensorBoard's writer and the
#: monitor of progress bars.
_THREADS_WITHOUT_LOCKS = ("_AsyncWriterThread", "TMonitor")

#: Seconds after which the fork is ended that only tries a backward pass.
BACKWARD_TRIAL_S = 10


def why_not_fork(device: torch.device | None = None) -> str | None:
    """Return the reason why a fork of this process could not train, or None if it could.

    Example:
        >>> why_not_fork() is None or "process" in why_not_fork()
        True
    """
    if LIBC is None:
        return "processes are forked on Linux only"
    if device is not None and device.type != "cpu":
        return "a process that uses an accelerator cannot be forked"
    if torch.cuda.is_initialized():
        return "a process that has used CUDA cannot be forked"
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return "a process of a torch.distributed group cannot be forked"
    if multiprocessing.active_children():
        gc.collect()  # ends the workers of a loader's iterator that nothing refers to any more
    if multiprocessing.active_children():
        return "the process has children, such as persistent workers of a loader, which a fork would share"
    for thread in threading.enumerate():
        is_current = thread is threading.current_thread()
        may_hold_locks = type(thread).__name__ not in _THREADS_WITHOUT_LOCKS
        if may_hold_locks and not is_current:
            return f"the process runs other threads ({thread.name}), which a fork has not"
    # On such a machine autograd starts threads of its own, which a fork of a process that has trained waits for.
    if has_accelerator() and not _fork_differentiates():
        return "this machine has an accelerator, and the process has trained before, so that a fork cannot train"
    return None


def has_accelerator() -> bool:
    accelerators = getattr(torch, "accelerator", torch.cuda)  # torch 2.4 knows CUDA's only
    return bool(accelerators.is_available())


def _fork_differentiates() -> bool:
    """Return whether a fork of this process can do a backward pass on the CPU."""
    child = quiet_fork()
    if child:  # in the parent
        _, status = os.waitpid(child, 0)
        return status == 0
    try:  # in the child
        # A fork without autograd's threads would wait for these threads for ever, so an alarm ends the fork.
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(BACKWARD_TRIAL_S)
        torch.ones(1, requires_grad=True).sum().backward()
        os._exit(0)
    except BaseException:
        os._exit(1)


def num_cores() -> int:
    """Return the number of processor cores that this process may use."""
    num_shared_cores = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        num_shared_cores = len(os.sched_getaffinity(0))
    num_local_processes = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    return max(1, num_shared_cores // num_local_processes)


class _ProcessStatus(NamedTuple):
    """A process's state, a letter, its parent's id, and the processor times that it has used."""

    state: str
    parent: int
    times: tuple[str, str]


def cpu_times_while_asleep(pid: int) -> list[tuple[int, tuple[str, str]]] | None:
    """Return the processor times of a process and its descendants if all of them sleep, otherwise None.

    If two calls return the same, none of them has used a processor in between.
    """
    # Mostly the process itself is running: then no other has to be read.
    if not _is_asleep(pid):
        return None
    statuses = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            status = _status_in(f"/proc/{name}")
            if status is not None:
                statuses[int(name)] = status

    family = _with_descendants(pid, statuses)
    if not all(_is_asleep(member) for member in family):
        return None
    return [(member, statuses[member].times) for member in sorted(family)]


def _status_in(folder: str) -> _ProcessStatus | None:
    """Read the status of a process or thread, None if it has ended or the system does not tell."""
    try:
        with open(f"{folder}/stat") as file:
            text = file.read()
    except OSError:
        return None
    # The other fields follow the program's name in parentheses, which may hold spaces and parentheses itself. See
    # proc(5): `utime` and `stime` are the fields 14 and 15, and `later_fields` begins with field 5.
    _, _, text_after_name = text.rpartition(") ")
    state, parent, *later_fields = text_after_name.split()
    user_time, system_time = later_fields[9:11]
    return _ProcessStatus(state=state, parent=int(parent), times=(user_time, system_time))


def _is_asleep(pid: int) -> bool:
    """Return whether all threads of a process sleep: one of them may wait for a disk."""
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return False
    for thread in threads:
        status = _status_in(f"/proc/{pid}/task/{thread}")
        if status is not None and status.state not in ("S", "Z"):
            return False
    return True


def _with_descendants(pid: int, statuses: Mapping[int, _ProcessStatus]) -> set[int]:
    # A pass over all processes may find a child after its children. Passes are repeated until one finds no more.
    family = {pid}
    size_before_pass = 0
    while size_before_pass < len(family):
        size_before_pass = len(family)
        for member, status in statuses.items():
            if status.parent in family:
                family.add(member)
    return family


def quiet_fork() -> int:
    """Fork this process without output. Return the child's process id, or 0 in the child."""
    parent = os.getpid()
    random_state = random.getstate()
    read_end, write_end = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python warns of threads, see why_not_fork
        child = os.fork()
    if child:  # in the parent
        os.close(write_end)
        try:
            # The read returns when the child has closed its end. By then the child shares no position in a file.
            os.read(read_end, 1)
        except BaseException:  # Ctrl-C: nobody else knows of the child yet
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            raise
        finally:
            os.close(read_end)
        return child
    try:  # in the child
        os.close(read_end)
        set_up_child(parent)
        gc.freeze()  # a garbage collection would copy the memory of all objects
        random.setstate(random_state)  # Python seeds its generator anew in a fork
        _silence_standard_streams()
        _copy_shared_memory()
        _copy_open_files()
        torch.set_num_threads(1)  # a pool of threads does not outlive a fork
        os.close(write_end)
    except BaseException:
        os._exit(1)
    return 0


def set_up_child(parent: int) -> None:
    """Make this process end when its parent ends, and at SIGTERM and SIGINT."""
    os.setpgid(0, 0)  # a process group of its own, so that Ctrl-C at the terminal is the parent's
    if LIBC is not None:
        # From here on the system kills the child when its parent ends, which may have happened before.
        LIBC.prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
        parent_has_ended = os.getppid() != parent
        if parent_has_ended:
            os._exit(1)
    # The child does not use the parent's handlers: these signals end the child.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)


def _silence_standard_streams() -> None:
    null_device = os.open(os.devnull, os.O_RDWR)
    for standard_stream in range(3):
        os.dup2(null_device, standard_stream)
    sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - until the process ends


def _copy_open_files() -> None:
    """Replace a fork's open files by files of its own, since it shares their positions with its parent."""
    folder = "/proc/self/fd"
    if not os.path.isdir(folder):
        return
    for name in os.listdir(folder):
        path = f"{folder}/{name}"
        with suppress(OSError):
            if os.path.isfile(path):
                _replace_open_file(int(name), path)


def _replace_open_file(descriptor: int, path: str) -> None:
    """Replace an open file by one that is opened anew for reading, by a copy if it is open for both, or by the null
    device if it is open for writing only."""
    import fcntl  # not on all systems

    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    position = os.lseek(descriptor, 0, os.SEEK_CUR)
    access = flags & os.O_ACCMODE
    if access == os.O_RDWR:  # the fork may write, which must not change the file
        replacement = _copy_to_memory(descriptor)
    elif access == os.O_RDONLY:
        replacement = os.open(path, access)
    else:  # what the fork writes is lost
        replacement = os.open(os.devnull, access)

    os.lseek(replacement, position, os.SEEK_SET)
    fcntl.fcntl(replacement, fcntl.F_SETFL, flags)
    os.dup2(replacement, descriptor)
    os.close(replacement)


def _copy_to_memory(descriptor: int) -> int:
    """Return the descriptor of a file in memory with the content of an open file."""
    copy = os.memfd_create("copy")
    size = os.fstat(descriptor).st_size
    num_copied = 0
    while num_copied < size:
        num_bytes = os.sendfile(copy, descriptor, num_copied, size - num_copied)
        if num_bytes == 0:  # the file has become shorter
            break
        num_copied += num_bytes
    return copy


def _copy_shared_memory() -> None:
    """Replace memory that this process shares with its parent, such as a mapped file, by private copies."""
    maps = Path("/proc/self/maps")
    if not maps.is_file():
        return
    for line in maps.read_text().splitlines():
        # Such as "7f1c2000-7f1c4000 rw-s 00000000 08:01 1234 /tmp/file". Memory without a file has no path.
        addresses, rights, offset, _device, _inode, *paths = line.split(maxsplit=5)
        path = paths[0] if paths else ""
        is_shared = rights.startswith("rw-s")
        is_of_device = path.startswith(_DEVICE_PATHS)
        if not is_shared or is_of_device:
            continue
        begin, end = addresses.split("-")
        address = int(begin, 16)
        size = int(end, 16) - address
        if size > _LARGEST_COPY_BYTES and os.path.isfile(path):
            _map_file(address, size, path=path, offset=int(offset, 16))
        else:
            _copy_memory(address, size)


def _copy_memory(address: int, size: int) -> None:
    """Replace shared memory by private memory with the same content."""
    content = ctypes.string_at(address, size)
    _map_memory(address, size, flags=mmap.MAP_ANONYMOUS, descriptor=-1, offset=0)
    ctypes.memmove(address, content, size)


def _map_file(
    address: int,
    size: int,
    *,
    path: str,
    offset: int,
) -> None:
    """Replace the shared memory of a mapped file by private memory, of which only what is written to is copied."""
    descriptor = os.open(path, os.O_RDONLY)
    _map_memory(address, size, flags=0, descriptor=descriptor, offset=offset)
    os.close(descriptor)


def _map_memory(
    address: int,
    size: int,
    *,
    flags: int,
    descriptor: int,
    offset: int,
) -> None:
    assert LIBC is not None
    LIBC.mmap(
        ctypes.c_void_p(address),
        ctypes.c_size_t(size),
        mmap.PROT_READ | mmap.PROT_WRITE,
        flags | mmap.MAP_PRIVATE | _MAP_FIXED,
        descriptor,
        ctypes.c_long(offset),
    )
