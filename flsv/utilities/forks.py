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
from contextlib import suppress

import torch

_SET_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG
#: The C library, or None where a process cannot be forked.
LIBC = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None
_FIXED = 0x10  # MAP_FIXED
#: Size in bytes up to which a fork copies a file that is mapped into memory.
_COPIED = 2**28
#: Classes of threads that may run at a fork: TensorBoard's writer and the monitor of progress bars hold no lock that a
#: child needs.
_HARMLESS = ("_AsyncWriterThread", "TMonitor")

#: Seconds after which the fork is ended that only tries a backward pass.
TRIAL_S = 10


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
        return "the process has children, such as persistent workers of a loader, which a fork would share"
    others = [each for each in threading.enumerate() if each is not threading.current_thread()]
    if foreign := [each.name for each in others if type(each).__name__ not in _HARMLESS]:
        return f"the process runs other threads ({foreign[0]}), which a fork has not"
    if has_accelerator() and not _fork_differentiates():
        return "this machine has an accelerator, and the process has trained before, so that a fork cannot train"
    return None


def has_accelerator() -> bool:
    return bool(
        getattr(torch, "accelerator", torch.cuda).is_available()
    )  # torch 2.4 knows CUDA's only


def _fork_differentiates() -> bool:
    """Return whether a fork of this process can do a backward pass on the CPU."""
    child = quiet_fork()
    if child:
        _, status = os.waitpid(child, 0)
        return status == 0
    try:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(TRIAL_S)
        torch.ones(1, requires_grad=True).sum().backward()
        os._exit(0)
    except BaseException:
        os._exit(1)


def cores() -> int:
    """Return the number of processor cores that this process may use."""
    count = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    return max(1, count // int(os.environ.get("LOCAL_WORLD_SIZE", 1)))


def asleep(pid: int) -> object:
    """Return the processor times of a sleeping process and its descendants. None if one of them is running."""
    found: dict[int, list[str]] = {}
    # That of the process itself is usually the only one that is read.
    for name in (f"{pid}", *filter(str.isdigit, os.listdir("/proc"))) if LIBC is not None else ():
        with suppress(OSError), open(f"/proc/{name}/stat") as file:
            found[int(name)] = (
                file.read().rpartition(") ")[2].split()
            )  # state, parent, ..., [11:13] time
        if pid not in found or found[pid][0] != "S":
            return None
    own, before = [pid], 0
    while before < len(own):
        before, own = len(own), [pid, *(each for each, of in found.items() if int(of[1]) in own)]
    awake = any(found[each][0] not in "SZ" for each in own)
    return None if awake or LIBC is None else sorted((each, *found[each][11:13]) for each in own)


def quiet_fork() -> int:
    """Fork this process without output. Return the child's process id, or 0 in the child."""
    parent, drawn = os.getpid(), random.getstate()
    read, write = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python warns of threads, see why_not_fork
        child = os.fork()
    if child:
        os.close(write)
        os.read(read, 1)  # until the child has its own positions in files
        os.close(read)
        return child
    try:
        os.close(read)
        as_a_child(parent)
        gc.freeze()  # a collection would copy the memory of all objects
        random.setstate(drawn)  # Python seeds it anew in a fork
        null = os.open(os.devnull, os.O_RDWR)
        for standard in range(3):
            os.dup2(null, standard)
        sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - until the process ends
        _own_memory()
        _own_descriptors()
        torch.set_num_threads(1)  # a pool of threads does not outlive a fork
        os.close(write)
    except BaseException:
        os._exit(1)
    return 0


def as_a_child(parent: int) -> None:
    """Make this process end when its parent ends, and at SIGTERM and SIGINT."""
    os.setpgid(0, 0)  # Ctrl-C at the terminal is the parent's
    if LIBC is not None:
        LIBC.prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)


def _own_descriptors() -> None:
    """Replace a fork's shared open files by copies, and those opened only for writing by the null device."""
    import fcntl  # not on all systems

    folder = "/proc/self/fd"
    for name in os.listdir(folder) if os.path.isdir(folder) else ():
        number = int(name)
        with suppress(OSError):
            if not os.path.isfile(f"{folder}/{name}"):
                continue
            flags, place = fcntl.fcntl(number, fcntl.F_GETFL), os.lseek(number, 0, os.SEEK_CUR)
            if flags & os.O_ACCMODE == os.O_RDWR:
                own = os.memfd_create(name)
                size = os.fstat(number).st_size
                while (done := os.lseek(own, 0, os.SEEK_END)) < size and os.sendfile(
                    own, number, done, size - done
                ):
                    pass
            else:
                read = flags & os.O_ACCMODE == os.O_RDONLY
                own = os.open(f"{folder}/{name}" if read else os.devnull, flags & os.O_ACCMODE)
            os.lseek(own, place, os.SEEK_SET)
            fcntl.fcntl(own, fcntl.F_SETFL, flags)
            os.dup2(own, number)
            os.close(own)


def _own_memory() -> None:
    """Replace memory that this process shares with its parent by private copies."""
    # A large file in memory is not copied before this process writes to it.
    assert LIBC is not None
    maps = "/proc/self/maps"
    for line in open(maps).read().splitlines() if os.path.isfile(maps) else ():  # noqa: SIM115
        place, rights, offset, _, _, *path = line.split(maxsplit=5)
        if not rights.startswith("rw-s") or (
            path and path[0].startswith(("/dev/dri", "/dev/nvidia"))
        ):
            continue
        start, end = (int(each, 16) for each in place.split("-"))
        large = end - start > _COPIED and path and os.path.isfile(path[0])
        file = os.open(path[0], os.O_RDONLY) if large else -1
        before = ctypes.string_at(start, end - start) if file < 0 else b""
        kind = _FIXED | mmap.MAP_PRIVATE | (mmap.MAP_ANONYMOUS if file < 0 else 0)
        sizes = (ctypes.c_size_t(end - start), mmap.PROT_READ | mmap.PROT_WRITE, kind, file)
        LIBC.mmap(
            ctypes.c_void_p(start), *sizes, ctypes.c_long(int(offset, 16) if file >= 0 else 0)
        )
        ctypes.memmove(start, before, len(before))
        if file >= 0:
            os.close(file)
