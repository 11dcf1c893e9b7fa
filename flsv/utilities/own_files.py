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

# Flags of unshare(2), mount(2) and mount_setattr(2).
_NEW_MOUNTS = 0x00020000  # CLONE_NEWNS
_NEW_USER = 0x10000000  # CLONE_NEWUSER
_PRIVATE = 0x44000  # MS_PRIVATE | MS_REC
_BIND = 0x1000  # MS_BIND
_READ_ONLY = 1  # MOUNT_ATTR_RDONLY
_RECURSIVE = 0x8000  # AT_RECURSIVE
_SET_MOUNT_ATTRIBUTES = 442  # the number of the system call mount_setattr

#: Folders of the root that a process may only read.
_SYSTEM_FOLDERS = (
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
_WRITING_FLAGS = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
#: First letters of the names of folders that processes own.
FOLDER_PREFIX = ".coalitions"


@contextmanager
def own_folder(root: Path | None = None) -> Iterator[Path]:
    """Yield a new folder, and delete it at the end. Folders that killed processes left are deleted first."""
    if root is None or not os.access(root, os.W_OK):
        root = Path(tempfile.gettempdir())
    root = root.absolute()
    with ExitStack() as locks:
        # While the root is locked, no other process takes the new folder for a leftover.
        with _locked(root):
            for leftover_folder in root.glob(f"{FOLDER_PREFIX}*"):
                _delete_unless_locked(leftover_folder)
            folder = Path(tempfile.mkdtemp(prefix=FOLDER_PREFIX, dir=root))
            locks.enter_context(_locked(folder))
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _delete_unless_locked(folder: Path) -> None:
    """Delete a process's folder, unless the process lives or the folder is another user's."""
    with suppress(OSError), _locked(folder, wait=False):
        shutil.rmtree(folder)


@contextmanager
def _locked(folder: Path, wait: bool = True) -> Iterator[None]:
    """Lock a folder for this process and its forks. Without ``wait``, raise OSError if it is locked."""
    operation = fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(descriptor, operation)
        except OSError:
            # With `wait` the lock is always got, except on a network's file system that has no locks of folders.
            if not wait:
                raise
        yield
    finally:
        os.close(descriptor)


def own_view(folders: Iterable[str], mount_point: str) -> None:
    """Redirect this fork's writes to ``folders`` into memory at ``mount_point``. Other processes do not see them."""
    working_folder = os.getcwd()
    _enter_new_mount_namespace()
    folders_to_cover = [working_folder, tempfile.gettempdir(), *folders]
    descriptors = _open_folders(folders_to_cover)
    _mount(source="tmpfs", target=mount_point, kind="tmpfs")
    # The path may be hidden by an overlay, so the folder is named by its descriptor.
    memory_descriptor = os.open(mount_point, os.O_PATH)
    memory_folder = f"/proc/self/fd/{memory_descriptor}"

    # Files in memory stay writable, as do the folders that get an overlay below.
    _set_read_only("/", flags=_RECURSIVE)
    for folder in (memory_folder, "/dev/shm"):
        with suppress(OSError):
            _set_writable(folder)

    for number, (folder, descriptor) in enumerate(descriptors.items()):
        # A file system that takes no overlay is seen as it is, but not written to.
        with suppress(OSError):
            source = f"/proc/self/fd/{descriptor}"
            _cover(folder, source, drafts_folder=f"{memory_folder}/{number}")
        os.close(descriptor)
    os.chdir(working_folder)


def _enter_new_mount_namespace() -> None:
    """Give this process mounts of its own, which other processes do not see."""
    user = os.getuid()
    group = os.getgid()
    if _call("unshare", _NEW_MOUNTS, raises=False) != 0:
        # Without root's rights, a process may mount in a namespace of users, in which it keeps its ids.
        _call("unshare", _NEW_USER | _NEW_MOUNTS)
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
        Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
    _mount(None, "/", None, flags=_PRIVATE)


def _open_folders(folders: Iterable[str]) -> dict[str, int]:
    """Open the folders to cover, as ``{folder: descriptor}``, outer folders first: those of the root except the
    system's, and in these the mounted ones and ``folders``."""
    # Each of these folders gets an overlay of its own. Links are left out, since their targets are among the folders:
    # a second overlay through a link would hide the overlays inside the target.
    paths = set()
    for name in os.listdir("/"):
        if name not in _SYSTEM_FOLDERS and not os.path.islink(f"/{name}"):
            paths.add(f"/{name}")

    # A write into an overlay copies all folders above the file, which fails if they are other users'. So `folders` get
    # overlays of their own. Mounted folders do, since the overlay of a folder above does not show them.
    inner_paths = [os.path.realpath(folder) for folder in folders]
    inner_paths += _mounted_folders()
    for path in inner_paths:
        root_folder = path.split("/")[1]
        if f"/{root_folder}" in paths:
            paths.add(path)

    descriptors = {}
    for path in sorted(paths):
        with suppress(OSError):
            descriptors[path] = os.open(path, os.O_PATH | os.O_DIRECTORY)
    return descriptors


def _mounted_folders() -> list[str]:
    folders = []
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        _, _, _, _, folder, *_ = line.split()
        folders.append(folder)
    return folders


def _cover(folder: str, source: str, drafts_folder: str) -> None:
    """Mount an overlay of ``source`` on a folder, so that what is written there goes to ``drafts_folder``, or else
    ``source`` itself."""
    upper = f"{drafts_folder}/upper"
    work = f"{drafts_folder}/work"
    os.makedirs(upper)
    os.mkdir(work)
    options = f"lowerdir={source},upperdir={upper},workdir={work}"
    try:
        _mount(source="overlay", target=folder, kind="overlay", options=options)
    except OSError:  # this file system takes no overlay
        _mount(source, folder, None, flags=_BIND)


def no_writes(permitted_folder: str) -> None:
    """Make Python raise PermissionError when this process writes outside of a folder."""
    # For systems without `own_view`.
    tempfile.tempdir = permitted_folder
    writable_folders = (os.path.realpath(permitted_folder), "/dev")

    def check_path(path: Any) -> None:
        if not isinstance(path, str | bytes | os.PathLike):
            return
        written_path = os.fsdecode(path)
        is_writable = os.path.realpath(written_path).startswith(writable_folders)  # with any
        if not is_writable:
            raise PermissionError(
                f"it writes {written_path}, and this system gives a process no view of files of its own (namespaces "
                "of users). Write no files in hooks, or value the run by flsv retrain"
            )

    def check_event(event: str, arguments: tuple[Any, ...]) -> None:
        if event != "open":
            return
        path, _, flags = arguments
        if isinstance(flags, int) and flags & _WRITING_FLAGS:
            check_path(path)

    sys.addaudithook(check_event)

    # torch.save opens files without Python.
    serialization: Any = torch.serialization
    open_zip_file = serialization._open_zipfile_writer

    def open_checked(name: Any) -> Any:
        check_path(name)
        return open_zip_file(name)

    serialization._open_zipfile_writer = open_checked


def _set_read_only(folder: str, flags: int) -> None:
    _set_mount_attributes(folder, flags, set_attributes=_READ_ONLY, cleared_attributes=0)


def _set_writable(folder: str) -> None:
    _set_mount_attributes(folder, 0, set_attributes=0, cleared_attributes=_READ_ONLY)


def _set_mount_attributes(
    folder: str,
    flags: int,
    *,
    set_attributes: int,
    cleared_attributes: int,
) -> None:
    # struct mount_attr of mount_setattr(2): attr_set, attr_clr, propagation and userns_fd. The last two stay 0.
    attributes = (ctypes.c_uint64 * 4)(set_attributes, cleared_attributes)
    no_folder_descriptor = -1  # the path is absolute
    _call(
        "syscall",
        _SET_MOUNT_ATTRIBUTES,
        no_folder_descriptor,
        folder.encode(),
        flags,
        attributes,
        ctypes.sizeof(attributes),
    )


def _mount(
    source: str | None,
    target: str,
    kind: str | None,
    *,
    flags: int = 0,
    options: str | None = None,
) -> None:
    _call(
        "mount",
        _encode(source),
        _encode(target),
        _encode(kind),
        ctypes.c_ulong(flags),
        _encode(options),
    )


def _encode(text: str | None) -> bytes | None:
    if text is None:
        return None
    return text.encode()


def _call(name: str, *arguments: Any, raises: bool = True) -> int:
    """Call a function of the C library. With ``raises``, raise OSError if it fails."""
    if LIBC is None:
        raise OSError("there are no namespaces on this system")
    status: int = getattr(LIBC, name)(*arguments)
    if status and raises:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
    return status
