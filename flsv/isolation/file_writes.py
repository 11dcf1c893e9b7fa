"""Functions that are called before a file is written, and files that are restored after it."""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch

from flsv.utilities.atomic_files import whole_lines

#: Python's audit events, with what is about to happen at the path that is the first argument, and at the second one.
#: "entry": what lies there is made, removed or replaced. "content": its content changes. "update": it is opened to be
#: read and perhaps changed. "overwrite": it gets a new content. "tree": it is moved or removed with all below it.
#: "temporary": something is made there under a random name.
_ACCESSES = {
    "open": "read",  # or what the flags say
    "os.chdir": "read",
    "os.chmod": "content",
    "os.link": "content entry",
    "os.listdir": "read",
    "os.mkdir": "entry",
    "os.remove": "entry",
    "os.rename": "tree entry",
    "os.rmdir": "content",
    "os.scandir": "read",
    "os.symlink": "read entry",
    "os.truncate": "content",
    "os.utime": "content",
    "shutil.rmtree": "tree",
    "sqlite3.connect": "update",
    "tempfile.mkdtemp": "temporary",
    "tempfile.mkstemp": "temporary",
}
#: Accesses that change what a link leads to, and not the link.
CHANGES = ("content", "update", "overwrite")
#: The size up to which a file is copied if it may only be read, as np.memmap does.
MAX_COPIED_BYTES = 2**28
#: Parts of the paths of caches, in which files stay.
_CACHES = ("__pycache__", "/.cache/", "/.triton/", "/torchinductor_")
#: Function of a path and of the name of what is about to happen there.
Watcher = Callable[[str, str], None]

#: By each watcher, the threads for whose writes it is not called. The watchers have the order in which they began.
_watchers: dict[Watcher, frozenset[int]] = {}
_state = threading.local()
#: Held while a watcher is added or removed.
_lock = threading.Lock()
#: What to undo after the last watcher.
_undo = ExitStack()


def watch(watcher: Watcher, other_threads: frozenset[int] = frozenset()) -> None:
    """Call ``watcher`` before Python code of this process or its forks opens a file, until :func:`unwatch`.

    It is also called before ``torch.save``, but not before other libraries write in C++, or other programs write.
    """
    _listen()
    with _lock:
        if not _watchers:
            _announce_files_of_torch()
        _watchers[watcher] = other_threads


def unwatch(watcher: Watcher) -> None:
    """End what :func:`watch` has begun. A second call does nothing."""
    with _lock:
        _watchers.pop(watcher, None)
        if not _watchers:
            _undo.close()


def _announce_files_of_torch() -> None:
    """Raise Python's event before torch opens a path in C++, where Python raises none, until ``_undo`` is closed."""
    serialization: Any = torch.serialization
    open_writer = serialization._open_zipfile_writer

    def open_announced(path: Any) -> Any:
        if isinstance(path, str | os.PathLike):
            sys.audit("open", path, "w", os.O_WRONLY | os.O_TRUNC)
        return open_writer(path)

    def put_back() -> None:
        # Another library may have replaced the function since.
        if serialization._open_zipfile_writer is open_announced:
            serialization._open_zipfile_writer = open_writer

    serialization._open_zipfile_writer = open_announced
    _undo.callback(put_back)


@contextmanager
def watched(watcher: Watcher) -> Iterator[None]:
    """Call ``watcher`` before this thread, or one that begins in this context, opens a file."""
    threads = {thread.ident or 0 for thread in threading.enumerate()}
    watch(watcher, frozenset(threads - {threading.get_ident()}))
    try:
        yield
    finally:
        unwatch(watcher)


@contextmanager
def unwatched() -> Iterator[None]:
    """Call no watcher before this thread writes in this context."""
    was_silent = getattr(_state, "is_silent", False)
    _state.is_silent = True
    try:
        yield
    finally:
        _state.is_silent = was_silent


@cache
def _listen() -> None:
    """Listen to Python's audit events. This cannot be ended."""
    sys.addaudithook(_hear)


def _hear(event: str, arguments: tuple[Any, ...]) -> None:
    if event not in _ACCESSES or not _watchers or getattr(_state, "is_silent", False):
        return
    accesses = _ACCESSES[event].split()
    if event == "open":
        accesses = [_access_by_flags(arguments[2])]
    with unwatched():
        for path, access in zip(arguments, accesses):
            if isinstance(path, str | bytes | os.PathLike):
                _tell(os.path.abspath(os.fsdecode(path)), access)


def _tell(path: str, access: str) -> None:
    for watcher, other_threads in list(_watchers.items()):
        if threading.get_ident() not in other_threads:
            watcher(path, access)


def _access_by_flags(flags: int) -> str:
    """Return what is about to happen to a file that is opened with these flags."""
    if not flags & (os.O_WRONLY | os.O_RDWR):
        return "read"
    if flags & os.O_EXCL:
        return "entry"
    if flags & os.O_TRUNC:
        return "overwrite"
    return "content" if flags & (os.O_WRONLY | os.O_APPEND) else "update"


class KeptFiles:
    """Files and folders as they were before they were written, which :meth:`put_back` restores.

    Several processes may keep files in one folder. What the first has kept of a path counts, and is complete before
    anything is written there.

    Args:
        folder: where copies are stored. It need not exist.
    """

    def __init__(self, folder: str) -> None:
        self._folder = folder
        # {path: what was there}, of what this process has kept
        self.kinds: dict[str, str] = {}
        # {path of a file that was too large to be copied: its time}
        self._times_of_large: dict[str, float] = {}

    def keep_to_put_back(self, path: str, access: str) -> None:
        """Keep what is about to change by an access to a path, which may lead there by links."""
        path = os.path.realpath(path) if access in CHANGES else resolved(path)
        if access == "temporary":
            self.kinds[path] = "new"  # it stays, since no other code finds it by its name
        elif access != "read" and not any(name in path for name in _CACHES):
            self.keep(path, access)

    def keep(self, path: str, access: str) -> None:
        """Keep what is seen at a path before an access."""
        if self._is_kept(path):
            return
        if access == "tree" and not os.path.islink(path):
            for folder, folders, files in os.walk(path):
                for name in (*folders, *files):
                    self._keep_entry(os.path.join(folder, name), access)
        if access == "update" and is_large(path):
            self._times_of_large.setdefault(path, os.path.getmtime(path))
        else:
            self._keep_entry(path, access)

    def _is_kept(self, path: str) -> bool:
        """Return whether a path is kept, or in a folder that was not there."""
        folders = map(str, Path(path).parents)
        return path in self.kinds or any(self.kinds.get(folder) == "new" for folder in folders)

    def _keep_entry(self, path: str, access: str) -> None:
        source = os.path.realpath(path) if access in CHANGES else path
        kind = _kind_of(source)
        if path in self.kinds or kind == "device":
            return
        os.makedirs(self._folder, exist_ok=True)
        original = ""
        if kind == "link":
            original = os.readlink(path)
        elif kind == "file":
            original = os.path.join(self._folder, uuid4().hex)
            shutil.copy2(source, original)
        line = json.dumps([path, kind, original])
        # In one call, so that the lines of several processes do not mix.
        with open(f"{self._folder}/journal", "ab", buffering=0) as file:
            file.write(f"{line}\n".encode())
        self.kinds[path] = kind

    def originals(self) -> dict[str, tuple[str, str]]:
        """Return what was at each path, ``(kind, value)``: of a link where it leads, of a file the path of a copy."""
        originals: dict[str, tuple[str, str]] = {}
        journal = Path(self._folder, "journal")
        for line in whole_lines(journal) if journal.exists() else []:
            path, kind, value = json.loads(line)
            originals.setdefault(path, (kind, value))
        return dict(sorted(originals.items()))  # a folder before what is in it

    def put_back(self) -> None:
        """Put everything back, and forget it."""
        with unwatched():
            for path, (kind, value) in self.originals().items():
                if resolved(path) == path:  # no folder on the way has become a link
                    _put_back(path, kind, value)
            shutil.rmtree(self._folder, ignore_errors=True)
        self.kinds = {}

    def changed_files(self) -> list[str]:
        """Return the files that were too large to be copied, and have changed. Forget them."""
        times = self._times_of_large.items()
        self._times_of_large = {}
        return [path for path, time in times if not _has_time(path, time)]


def _put_back(path: str, kind: str, value: str) -> None:
    if kind == "link" or _kind_of(path) != kind:
        remove(path)
    if kind == "folder":
        os.makedirs(path, exist_ok=True)
    elif kind == "link":
        os.symlink(value, path)
    elif kind == "file":  # into the same file, which may have other names
        shutil.copy2(value, path)


@contextmanager
def files_put_back() -> Iterator[None]:
    """Put back at the end of this context the files that this thread has written in it."""
    kept_files = KeptFiles(os.path.join(tempfile.gettempdir(), f"flsv-{uuid4().hex}"))
    try:
        with watched(kept_files.keep_to_put_back):
            yield
    finally:
        kept_files.put_back()


def _kind_of(path: str) -> str:
    if os.path.islink(path):
        return "link"
    if os.path.isdir(path):
        return "folder"
    if os.path.isfile(path):
        return "file"
    return "device" if os.path.exists(path) else "new"


def _has_time(path: str, time: float) -> bool:
    return os.path.exists(path) and os.path.getmtime(path) == time


def is_large(path: str) -> bool:
    """Return whether a file is not copied if it may only be read."""
    return os.path.isfile(path) and os.path.getsize(path) > MAX_COPIED_BYTES


def resolved(path: str) -> str:
    """Return the path of an entry of a folder without links in the folder's path."""
    folder, name = os.path.split(path)
    return os.path.join(os.path.realpath(folder), name)


def remove(path: str) -> None:
    """Remove what lies at a path, if anything."""
    if _kind_of(path) == "folder":
        shutil.rmtree(path, ignore_errors=True)
    elif os.path.lexists(path):
        os.unlink(path)
