"""Functions that give a process a folder and a view of the file system of its own."""

from __future__ import annotations

import ctypes
import fcntl
import os
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from flsv.utilities.forks import LIBC

_NEW_NAMESPACES = (0x00020000, 0x10020000)  # CLONE_NEWNS, which root may, and CLONE_NEWUSER with it
_PRIVATE, _BIND, _READ_ONLY, _RECURSIVE = 0x44000, 0x1000, 1, 0x8000
#: Top folders that are only read.
_SYSTEM = (
    "bin",
    "boot",
    "dev",
    "etc",
    "lib",
    "lib32",
    "lib64",
    "libx32",
    "proc",
    "run",
    "sbin",
    "sys",
    "usr",
)
_SET_MOUNT_ATTRIBUTES = 442
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
#: First letters of the names of folders that processes own.
OWN = ".coalitions"


@contextmanager
def own_folder(root: Path | None = None) -> Iterator[Path]:
    """Yield a new folder, and delete it at the end. Folders that killed processes left are deleted first."""
    root = (
        root if root is not None and os.access(root, os.W_OK) else Path(tempfile.gettempdir())
    ).absolute()
    with ExitStack() as held:
        with _locked(root):
            for left in root.glob(f"{OWN}*"):
                with (
                    suppress(OSError),
                    _locked(left, fcntl.LOCK_NB),
                ):  # its process lives, or is another user's
                    shutil.rmtree(left)
            folder = Path(tempfile.mkdtemp(prefix=OWN, dir=root))
            held.enter_context(_locked(folder))
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _locked(folder: Path, more: int = 0) -> Iterator[None]:
    """Lock a folder for this process and its forks, and with ``LOCK_NB`` raise OSError if it is locked."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | more)
        except OSError:  # a network's file system may have no locks of folders
            if more:
                raise
        yield
    finally:
        os.close(descriptor)


def own_view(folders: Iterable[str], own: str) -> None:
    """Redirect this fork's writes to ``folders`` into memory, mounted at ``own``. Other processes do not see them."""
    user, group, here = os.getuid(), os.getgid(), os.getcwd()
    if _call("unshare", _NEW_NAMESPACES[0], failing=False):
        _call("unshare", _NEW_NAMESPACES[1])
        for name, text in (
            ("setgroups", "deny"),
            ("uid_map", f"{user} {user} 1"),
            ("gid_map", f"{group} {group} 1"),
        ):
            Path("/proc/self", name).write_text(text)
    _mount(None, "/", None, _PRIVATE)
    lower = _opened([here, tempfile.gettempdir(), *folders])
    _mount("tmpfs", own, "tmpfs")
    drafts = f"/proc/self/fd/{os.open(own, os.O_PATH)}"
    _read_only("/", _RECURSIVE)
    for kept in (drafts, "/dev/shm"):
        with suppress(OSError):
            _read_only(kept, 0, clear=True)
    for number, (place, held) in enumerate(lower.items()):
        top, source = f"{drafts}/{number}", f"/proc/self/fd/{held}"
        os.makedirs(f"{top}/upper")
        os.mkdir(f"{top}/work")
        with suppress(
            OSError
        ):  # a file system that cannot be covered is seen as it is, but not written to
            try:
                _mount(
                    "overlay",
                    place,
                    "overlay",
                    0,
                    f"lowerdir={source},upperdir={top}/upper,workdir={top}/work",
                )
            except OSError:
                _mount(source, place, None, _BIND)
        os.close(held)
    os.chdir(here)


def no_writes(own: str) -> None:
    """Make Python raise PermissionError when this process writes outside the folder ``own``."""
    # For systems without `own_view`.
    tempfile.tempdir, allowed = own, (os.path.realpath(own), "/dev")

    def checked(path: Any) -> Any:
        if isinstance(path, str | bytes | os.PathLike) and not os.path.realpath(
            os.fsdecode(path)
        ).startswith(allowed):
            raise PermissionError(
                f"it writes {os.fsdecode(path)}, and this system gives a process no view of files of its own "
                "(namespaces of users). Write no files in hooks, or value the run by flsv retrain"
            )
        return path

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and isinstance(arguments[2], int) and arguments[2] & _WRITES:
            checked(arguments[0])

    sys.addaudithook(hook)
    serialization: Any = torch.serialization
    opened = serialization._open_zipfile_writer  # it opens files without Python
    serialization._open_zipfile_writer = lambda name: opened(checked(name))


def _opened(folders: Iterable[str]) -> dict[str, int]:
    """Open the folders whose writes are redirected, as ``{folder: descriptor}``, outer folders first."""
    tops = {
        f"/{name}"
        for name in os.listdir("/")
        if name not in _SYSTEM and not os.path.islink(f"/{name}")
    }
    mounted = {line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()}
    # A folder is copied with its owner when something is written below it, and users cannot copy those of others.
    below = {
        each
        for each in {*mounted, *map(os.path.realpath, folders)}
        if f"/{each.split('/')[1]}" in tops
    }
    held = {}
    for place in sorted(tops | below):
        with suppress(OSError):
            held[place] = os.open(place, os.O_PATH | os.O_DIRECTORY)
    return held


def _read_only(place: str, flags: int, clear: bool = False) -> None:
    attributes = (ctypes.c_uint64 * 4)(*((0, _READ_ONLY) if clear else (_READ_ONLY, 0)))
    _call(
        "syscall",
        _SET_MOUNT_ATTRIBUTES,
        -1,
        place.encode(),
        flags,
        attributes,
        ctypes.sizeof(attributes),
    )


def _mount(
    source: str | None, target: str, kind: str | None, flags: int = 0, options: str | None = None
) -> None:
    given = [None if each is None else each.encode() for each in (source, target, kind, options)]
    _call("mount", *given[:3], ctypes.c_ulong(flags), given[3])


def _call(name: str, *arguments: Any, failing: bool = True) -> int:
    """Call a function of the C library, and with ``failing`` raise OSError if it fails."""
    if LIBC is None:
        raise OSError("there are no namespaces on this system")
    status: int = getattr(LIBC, name)(*arguments)
    if status and failing:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
    return status
