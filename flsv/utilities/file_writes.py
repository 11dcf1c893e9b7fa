"""Writes of files by this process: functions that are told before each, and files that are put back after some."""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, wraps
from itertools import islice
from pathlib import Path
from typing import Any, Literal
from uuid import uuid4

import torch

from flsv.utilities.atomic_files import whole_lines

#: What will happen at a path. "entry": what lies there is made, removed or replaced by another. "content": its content
#: changes. "update": it is opened to be read and perhaps changed. "overwrite": it gets a new content. "tree": it is
#: removed or moved with all below it. "temporary": something is made there under a name of chance.
Access = Literal["read", "entry", "content", "update", "overwrite", "tree", "temporary"]
#: Python's audit events, with the position of each path among the arguments.
_ACCESSES: dict[str, list[tuple[int, Access]]] = {
    "open": [(0, "read")],
    "os.chdir": [(0, "read")],
    "os.chmod": [(0, "content")],
    "os.link": [(0, "content"), (1, "entry")],
    "os.listdir": [(0, "read")],
    "os.mkdir": [(0, "entry")],
    "os.remove": [(0, "entry")],
    "os.rename": [(0, "tree"), (1, "entry")],
    "os.rmdir": [(0, "content")],
    "os.scandir": [(0, "read")],
    "os.symlink": [(1, "entry")],
    "os.truncate": [(0, "content")],
    "os.utime": [(0, "content")],
    "shutil.rmtree": [(0, "tree")],
    "sqlite3.connect": [(0, "update")],
    "tempfile.mkdtemp": [(0, "temporary")],
    "tempfile.mkstemp": [(0, "temporary")],
}
#: Accesses that change what a link leads to, and not the link.
CHANGES = ("content", "update", "overwrite")
_WRITES = os.O_WRONLY | os.O_RDWR
#: Files that are opened to be read and changed, as np.memmap opens them, are copied up to this size.
MAX_COPIED_BYTES = 2**28
#: The most entries of a folder that are kept if it is moved or removed.
MAX_ENTRIES = 10_000
#: Names of folders with caches, in which files stay.
_CACHES = ("__pycache__", ".cache", ".triton", "torchinductor_")


@dataclass(eq=False)
class Watcher:
    """Functions that are called with a path before it is written, and before it is read."""

    before_write: Callable[[str, Access], None]
    before_read: Callable[[str], None] | None
    # Threads whose writes are not told: those that were there before.
    other_threads: frozenset[int]

    def tell(self, path: str, access: Access) -> None:
        """Call the function for this kind of access."""
        if threading.get_ident() in self.other_threads:
            return
        if access != "read":
            self.before_write(path, access)
        elif self.before_read is not None:
            self.before_read(path)


#: In the order in which they began.
_watchers: list[Watcher] = []
_state = threading.local()


def begin_to_watch(
    before_write: Callable[[str, Access], None],
    before_read: Callable[[str], None] | None = None,
    other_threads: frozenset[int] = frozenset(),
) -> Watcher:
    """Call functions with a path before Python writes there, or reads, until :func:`end_to_watch`.

    Told is what Python code of this process writes and its forks, and what ``torch.save`` does. Not told is what other
    libraries write in their own C++ code, what is written into files that were open before, and what other programs
    write.
    """
    _listen()
    watcher = Watcher(before_write, before_read, other_threads)
    _watchers.append(watcher)
    return watcher


def end_to_watch(watcher: Watcher) -> None:
    """End what :func:`begin_to_watch` has begun. A second call does nothing."""
    if watcher in _watchers:
        _watchers.remove(watcher)


@contextmanager
def watched(
    before_write: Callable[[str, Access], None],
    before_read: Callable[[str], None] | None = None,
) -> Iterator[None]:
    """Call functions with a path before this thread, or one that begins within this context, writes there or reads."""
    threads = {thread.ident or 0 for thread in threading.enumerate()}
    other_threads = frozenset(threads - {threading.get_ident()})
    watcher = begin_to_watch(before_write, before_read, other_threads)
    try:
        yield
    finally:
        end_to_watch(watcher)


@contextmanager
def unwatched() -> Iterator[None]:
    """Tell nobody of what this thread writes in this context."""
    was_telling = getattr(_state, "is_telling", False)
    _state.is_telling = True
    try:
        yield
    finally:
        _state.is_telling = was_telling


@cache
def _listen() -> None:
    """Listen to Python's audit events. This cannot be ended."""
    sys.addaudithook(_hear)
    untyped_serialization: Any = torch.serialization
    open_writer = untyped_serialization._open_zipfile_writer

    @wraps(open_writer)
    def open_announced(path: Any) -> Any:
        # torch opens a file by its name in C++, of which Python does not know.
        if isinstance(path, str | os.PathLike):
            sys.audit("open", path, "w", os.O_WRONLY | os.O_TRUNC)
        return open_writer(path)

    untyped_serialization._open_zipfile_writer = open_announced


def _hear(event: str, arguments: tuple[Any, ...]) -> None:
    if event not in _ACCESSES or not _watchers or getattr(_state, "is_telling", False):
        return
    accesses = _ACCESSES[event]
    if event == "open":
        accesses = [(0, _access_by_flags(arguments[2]))]
    _state.is_telling = True
    try:
        for position, access in accesses:
            path = _path_of(event, arguments[position])
            if path is not None:
                for watcher in list(_watchers):
                    watcher.tell(path, access)
    finally:
        _state.is_telling = False


def _access_by_flags(flags: int) -> Access:
    """Return what will happen to a file that is opened with these flags."""
    if not flags & _WRITES:
        return "read"
    if flags & os.O_EXCL:
        return "entry"
    if flags & os.O_TRUNC:
        return "overwrite"
    is_read_too = flags & os.O_RDWR and not flags & os.O_APPEND
    return "update" if is_read_too else "content"


def _path_of(event: str, argument: Any) -> str | None:
    """Return the absolute path that an event tells. None for a file that is open, or none."""
    if not isinstance(argument, str | bytes | os.PathLike):
        return None
    path = os.fsdecode(argument)
    if event == "sqlite3.connect":
        path, _, _ = path.removeprefix("file:").partition("?")
        if path in ("", ":memory:"):
            return None
    return os.path.abspath(path)


class KeptFiles:
    """Files and folders as they were before they were written, which :meth:`put_back` restores.

    Several processes may keep files in one folder. What the first has kept of a path counts, and is complete before
    anything is written there.

    Args:
        folder: where copies are stored. It need not exist.
    """

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._journal = os.path.join(folder, "journal")
        # Paths that this process has kept, and those of them at which nothing was.
        self.paths: set[str] = set()
        self._new_paths: set[str] = set()
        # {path of a file that was too large to be copied: its signature}
        self._large_files: dict[str, tuple[int, ...]] = {}

    def keep_to_put_back(self, path: str, access: Access) -> None:
        """Keep the file that is changed by this access to a path, which may lead there by links."""
        path = resolved(path)
        if access in CHANGES:
            path = os.path.realpath(path)
        if any(name in path for name in _CACHES):
            return
        if access == "temporary":  # its name is of chance, and it is left where it is
            self._new_paths.add(path)
        else:
            self.keep(path, access)

    def keep(self, path: str, access: Access) -> None:
        """Keep what is seen at a path, before this access."""
        if self.is_kept(path):
            return
        if access == "update" and is_large(path):
            self._large_files.setdefault(path, signature(path))
            return
        if access == "tree" and not os.path.islink(path):
            for folder, folders, files in islice(os.walk(path), MAX_ENTRIES):
                for name in (*folders, *files):
                    self._keep_entry(os.path.join(folder, name), access)
        self._keep_entry(path, access)

    def is_kept(self, path: str) -> bool:
        """Return whether a path is kept, or in a folder that was not there."""
        if path in self.paths or path in self._new_paths:
            return True
        if not self._new_paths:
            return False
        return any(str(folder) in self._new_paths for folder in Path(path).parents)

    def _keep_entry(self, path: str, access: Access) -> None:
        if path in self.paths:
            return
        os.makedirs(self._folder, exist_ok=True)
        kind, value = "new", ""
        if os.path.islink(path) and access not in CHANGES:
            kind, value = "link", os.readlink(path)
        elif os.path.isdir(path):
            kind = "folder"
        elif os.path.isfile(path):
            kind, value = "file", os.path.join(self._folder, uuid4().hex)
            shutil.copy2(path, value)
        elif os.path.exists(path):  # a device
            return
        line = json.dumps([path, kind, value])
        # In one call, so that the lines of several processes do not mix.
        with open(self._journal, "ab", buffering=0) as file:
            file.write(f"{line}\n".encode())
        self.paths.add(path)
        if kind == "new":
            self._new_paths.add(path)

    def originals(self) -> dict[str, tuple[str, str]]:
        """Return what was at each path: ``(kind, value)``, "new" for nothing, "folder", "link" with where it leads, or
        "file" with the path of a copy.
        """
        originals: dict[str, tuple[str, str]] = {}
        if os.path.exists(self._journal):
            for line in whole_lines(Path(self._journal)):
                path, kind, value = json.loads(line)
                originals.setdefault(path, (kind, value))
        return originals

    def put_back(self) -> None:
        """Put everything back, and forget it."""
        with unwatched():
            for path, (kind, value) in sorted(
                self.originals().items()
            ):  # a folder before what is in it
                if resolved(path) == path:  # no folder on the way has become a link
                    _put_back(path, kind, value)
            shutil.rmtree(self._folder, ignore_errors=True)
        self.paths.clear()
        self._new_paths.clear()

    def changed_files(self) -> list[str]:
        """Return the files that were too large to be copied and have changed, and forget them."""
        paths = changed_since(self._large_files)
        self._large_files = {}
        return paths


def _put_back(path: str, kind: str, value: str) -> None:
    is_folder = os.path.isdir(path) and not os.path.islink(path)
    has_kind = is_folder if kind == "folder" else kind == "file" and os.path.isfile(path)
    if os.path.islink(path) or not has_kind:
        remove(path)
    if kind == "new":
        return
    os.makedirs(os.path.dirname(path), exist_ok=True)
    if kind == "folder":
        os.makedirs(path, exist_ok=True)
    elif kind == "link":
        os.symlink(value, path)
    else:  # into the same file, which may have other names
        shutil.copy2(value, path)


@contextmanager
def files_put_back() -> Iterator[None]:
    """Put back at the end of this context the files that this thread has written in it."""
    folder = os.path.join(tempfile.gettempdir(), f"flsv-{uuid4().hex}")
    kept_files = KeptFiles(folder)
    try:
        with watched(kept_files.keep_to_put_back):
            yield
    finally:
        kept_files.put_back()


def resolved(path: str) -> str:
    """Return the path of an entry of a folder without links in the folder's path."""
    folder, name = os.path.split(path)
    return os.path.join(os.path.realpath(folder), name)


def remove(path: str) -> None:
    """Remove what lies at a path, if anything."""
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path, ignore_errors=True)
    elif os.path.lexists(path):
        os.unlink(path)


def is_large(path: str) -> bool:
    """Return whether a file is too large to be copied, since it may only be read."""
    return os.path.isfile(path) and os.path.getsize(path) > MAX_COPIED_BYTES


def signature(path: str) -> tuple[int, ...]:
    """Return by what a change of a file is noticed."""
    if not os.path.exists(path):
        return ()
    status = os.stat(path)
    return status.st_ino, status.st_size, status.st_mtime_ns


def changed_since(signatures: Mapping[str, tuple[int, ...]]) -> list[str]:
    """Return the paths of files that have other signatures now."""
    return [path for path, former in signatures.items() if signature(path) != former]
