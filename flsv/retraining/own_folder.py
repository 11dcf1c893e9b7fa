"""ProgramFolder: a program's folders as they were at one time, of which each coalition has its own to work in."""

from __future__ import annotations

import os
import shutil
import tempfile
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path

from filelock import FileLock, Timeout

from flsv.utilities.file_writes import (
    Access,
    KeptFiles,
    begin_to_watch,
    changed_since,
    end_to_watch,
    is_large,
    remove,
    resolved,
    signature,
    unwatched,
    watched,
)

#: Folders below the working folder that are a coalition's own from the start, and not links: the first so many, of so
#: many entries at most.
MAX_OWN_FOLDERS = 50
MAX_OWN_ENTRIES = 100
#: The most entries of a folder beside or above the working folder to which there are links before one is opened.
MAX_NEIGHBORS = 200
#: The most entries that are looked at after a run, to find what Python does not know to be written.
MAX_ENTRIES = 10_000
_PREFIX = "flsv-coalitions-"
#: Folders of code, which are links, beside hidden ones.
_CODE_FOLDER = "__pycache__"


class ProgramFolder:
    """The folders that a program works in, as they are now.

    A coalition sees the working folder, the folders beside and above it, and further folders. In a folder of its own
    each file is a link, which becomes a copy just before it is written. What a coalition writes elsewhere is put back
    after its fit. What the run writes in these folders is kept before, so that coalitions see them as they are now.

    Args:
        further: folders elsewhere that the program writes into by absolute paths.

    Attributes:
        changed_files: files that a coalition has changed, and that were too large to be copied before.
        shares_files: whether coalitions read files elsewhere that they write, so that no two may train at a time.
    """

    def __init__(self, further: Sequence[str] = ()) -> None:
        self.path = os.getcwd()
        # {a folder: its path below a coalition's folder}
        self.locations = {self.path: ""}
        for folder in further:
            is_inside = any(_is_inside(folder, location) for location in self.locations)
            if not is_inside and not _is_inside(self.path, folder):
                self.locations[folder] = f"folder_{len(self.locations)}"

        _put_back_after_kills()
        self._process = os.getpid()
        self._home = _new_folder(self)
        self._lock = FileLock(os.path.join(self._home, "lock"))
        self._lock.acquire()
        self._start = os.stat(self._home).st_ctime_ns
        self._files_of_run = KeptFiles(os.path.join(self._home, "run"))
        self._files_elsewhere = KeptFiles(os.path.join(self._home, "elsewhere"))
        # {path below a coalition's folder: where its link leads, None for a folder}
        self._entries: dict[str, str | None] = {}
        # Paths of entries that are copies at the beginning of each fit.
        self._copied_paths: set[str] = set()
        self._find_entries()
        self._own_folder: str | None = None
        # Paths of entries that are no longer as they were made.
        self._changed_paths: set[str] = set()
        # {path of a file that was too large to be copied: its signature}
        self._large_files: dict[str, tuple[int, ...]] = {}
        self.changed_files: list[str] = []
        self.shares_files = False
        self.begin_run()

    def __getstate__(self) -> dict[str, object]:
        # For a worker, which makes a folder of its own.
        return {**vars(self), "_own_folder": None, "_lock": None, "_watcher": None}

    def _find_entries(self) -> None:
        """Find the entries of a coalition's folder."""
        num_folders = len(self.locations)
        pending = deque(self.locations.items())
        while pending:
            folder, location = pending.popleft()
            if location:
                self._entries[location] = None
            for entry in _entries(folder):
                path = os.path.join(location, entry.name)
                self._entries[path] = entry.path
                if num_folders < MAX_OWN_FOLDERS and _is_small_folder(entry):
                    num_folders += 1
                    self._entries[path] = None
                    pending.append((entry.path, path))

    # ---- the run

    def begin_run(self) -> None:
        """Keep what the run writes below its folders, before it does, until :meth:`end_run`."""
        files = self._files_of_run
        home = self._home
        folders = set(self.locations).union(map(os.path.realpath, self.locations))

        def keep(path: str, access: Access) -> None:
            for path in dict.fromkeys([path, resolved(path)]):
                is_below = any(_is_inside(path, folder) for folder in folders)
                if is_below and not _is_inside(path, home):
                    with suppress(OSError):  # coalitions then see what the run has written
                        files.keep(path, access)

        self._watcher = begin_to_watch(keep)
        weakref.finalize(self, end_to_watch, self._watcher)

    def end_run(self) -> None:
        """End what :meth:`begin_run` has begun."""
        end_to_watch(self._watcher)

    def take_over_run(self) -> None:
        """Let coalitions have the folders as they were before the run, though it has written there.

        They have copies of what has changed since by what Python does not know.
        """
        for path, (kind, value) in self._files_of_run.originals().items():
            location = self._location(path)
            self._changed_paths.add(self._first_link(location))
            self._make_parents(location)
            if kind == "new":
                self._entries.pop(location, None)
            elif kind == "folder":
                self._entries[location] = None
            else:
                self._entries[location] = os.path.join(os.path.dirname(path), value)
        for path in self._written_by_others():
            location = self._location(path)
            self._changed_paths.add(self._first_link(location))
            self._make_parents(location)
            if location in self._entries:
                self._copied_paths.add(location)

    def _location(self, path: str) -> str:
        """Return the path below a coalition's folder of a path in the program's folders."""
        for folder, location in self.locations.items():
            for base in (folder, os.path.realpath(folder)):
                if _is_inside(path, base):
                    return os.path.normpath(os.path.join(location, os.path.relpath(path, base)))
        raise ValueError(path)

    def _make_parents(self, location: str) -> None:
        """Let the folders above an entry be a coalition's own, and not links."""
        for parent in reversed(Path(location).parents[:-1]):
            folder = self._entries.get(str(parent))
            if folder is None:
                continue
            self._entries[str(parent)] = None
            for entry in _entries(folder):
                self._entries[str(parent / entry.name)] = entry.path

    def _written_by_others(self) -> Iterator[str]:
        """Yield files that are newer than this object, and that Python does not know to be written."""
        pending = deque(self.locations)
        num_entries = 0
        while pending and num_entries < MAX_ENTRIES:
            for entry in _entries(pending.popleft()):
                num_entries += 1
                if self._files_of_run.is_kept(entry.path) or entry.is_symlink():
                    continue
                if entry.is_dir():
                    if not _is_code(entry):
                        pending.append(entry.path)
                    continue
                status = entry.stat()
                if max(status.st_mtime_ns, status.st_ctime_ns) >= self._start:
                    yield entry.path

    # ---- a coalition

    @contextmanager
    def entered(self) -> Iterator[str]:
        """Work in a coalition's folder. At the end :attr:`changed_files` names what could not be put back."""
        program_folder = os.getcwd()
        with unwatched():
            self._make_entries()
        assert self._own_folder is not None
        os.chdir(self._own_folder)
        try:
            with watched(self._before_write, self._before_read):
                yield self._own_folder
        finally:
            os.chdir(program_folder)
            changed_files = changed_since(self._large_files)
            self._large_files.clear()
            is_at_worker = os.getpid() != self._process and os.path.exists(self._home)
            if not is_at_worker:  # else the parent does, since others write there now
                self.put_back()
            changed_files += (
                self._files_elsewhere.changed_files() + self._files_of_run.changed_files()
            )
            self.changed_files = [f"the file {path}" for path in changed_files]

    def put_back(self) -> None:
        """Put back what coalitions have written elsewhere."""
        self._files_elsewhere.put_back()

    def _before_write(self, path: str, access: Access) -> None:
        """Make what a coalition is about to write its own, or keep it."""
        assert self._own_folder is not None
        self._before_read(path)
        if not _is_inside(path, self._own_folder):
            self._files_elsewhere.keep_to_put_back(path, access)
            return
        location = os.path.relpath(path, self._own_folder)
        self._changed_paths.add(self._first_link(location))
        folder = self._own_folder
        names = Path(location).parts
        is_of_link = access in ("entry", "temporary")
        for name in names[:-1] if is_of_link else names:
            folder = os.path.join(folder, name)
            if os.path.islink(folder):
                with FileLock(self._lock_of_links):  # other threads and forks write, too
                    self._break_link(folder, access)

    def _break_link(self, link: str, access: Access) -> None:
        """Replace a link by a folder of links, or by a copy."""
        if not os.path.islink(link):  # another thread was first
            return
        source = os.path.join(os.path.dirname(link), os.readlink(link))
        if access == "update" and is_large(source):
            self._large_files.setdefault(source, signature(source))
        elif os.path.isdir(source):
            os.unlink(link)
            os.mkdir(link)
            for entry in _entries(source):
                os.symlink(entry.path, os.path.join(link, entry.name))
        else:
            os.unlink(link)
            if access != "overwrite" and os.path.exists(source):
                shutil.copy2(source, link)

    def _before_read(self, path: str) -> None:
        """Link a neighbor of the working folder that is about to be opened. Note whether a coalition has written it."""
        assert self._own_folder is not None
        if _is_inside(path, self._own_folder):
            return
        for parent, folder in self._crowded_folders.items():
            if _is_inside(path, parent) and path != parent:
                name = Path(path).relative_to(parent).parts[0]
                source = os.path.join(folder, name)
                link = os.path.join(parent, name)
                if os.path.exists(source) and not os.path.lexists(link):
                    os.symlink(source, link)
        if self._files_elsewhere.paths and os.path.realpath(path) in self._files_elsewhere.paths:
            self.shares_files = True

    def _first_link(self, location: str) -> str:
        """Return the first part of a path below a coalition's folder that is no folder of its own."""
        path = ""
        for name in Path(location).parts:
            path = os.path.join(path, name)
            if self._entries.get(path, "") is not None:
                break
        return path

    # ---- the folder of coalitions

    def _make_entries(self) -> None:
        """Make the entries of a coalition's folder that are not as they were made."""
        if self._own_folder is None:
            self._make_folder()
        assert self._own_folder is not None
        unchanged_paths = set(self._unchanged_in(self._own_folder, location=""))
        for path, source in self._entries.items():
            if path in unchanged_paths:
                continue
            target = os.path.join(self._own_folder, path)
            if source is None:
                os.mkdir(target)
            elif path in self._copied_paths:
                shutil.copy2(source, target)
            else:
                os.symlink(source, target)
        self._changed_paths.clear()

    def _make_folder(self) -> None:
        """Make a coalition's folder, below folders that hold links to what is beside the program's folder."""
        is_at_worker = os.getpid() != self._process
        home = _new_folder(self) if is_at_worker else self._home
        self._lock_of_links = os.path.join(home, "lock_of_links")
        parent = os.path.join(home, "root")
        os.mkdir(parent)
        # {a folder beside which there are many: the program's}
        self._crowded_folders: dict[str, str] = {}
        present_folder = os.sep
        for name in Path(self.path).parts[1:]:
            neighbors = _entries(present_folder, MAX_NEIGHBORS + 1)
            if len(neighbors) > MAX_NEIGHBORS:
                self._crowded_folders[parent] = present_folder
                neighbors = []
            for entry in neighbors:
                if entry.name != name:
                    os.symlink(entry.path, os.path.join(parent, entry.name))
            present_folder = os.path.join(present_folder, name)
            parent = os.path.join(parent, name)
            os.mkdir(parent)
        self._own_folder = parent

    def _unchanged_in(self, folder: str, location: str) -> Iterator[str]:
        """Yield the paths of a folder's entries that are as they were made. Others are removed."""
        for entry in _entries(folder):
            path = os.path.join(location, entry.name)
            is_link = entry.is_symlink()
            is_of_kind = is_link if self._entries.get(path) else entry.is_dir(follow_symlinks=False)
            is_changed = path in self._changed_paths or path in self._copied_paths
            if path not in self._entries or is_changed or not is_of_kind:
                remove(entry.path)
                continue
            yield path
            if not is_link:
                yield from self._unchanged_in(entry.path, path)


def _new_folder(owner: ProgramFolder) -> str:
    """Make a folder that goes with its owner."""
    folder = os.path.realpath(tempfile.mkdtemp(prefix=_PREFIX))
    weakref.finalize(owner, _remove_unwatched, folder)
    return folder


def _remove_unwatched(folder: str) -> None:
    with unwatched():
        shutil.rmtree(folder, ignore_errors=True)


def _put_back_after_kills() -> None:
    """Put back what coalitions of processes have written elsewhere that were killed meanwhile."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        lock_file = folder / "lock"
        with suppress(OSError, Timeout):  # it is in use, or has just gone
            is_ours = folder.lstat().st_uid == os.getuid()
            if is_ours and lock_file.exists():
                with FileLock(lock_file, timeout=0):
                    KeptFiles(str(folder / "elsewhere")).put_back()
                    _remove_unwatched(str(folder))


def _entries(folder: str, max_entries: int | None = None) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return list(islice(entries, max_entries))
    except OSError:  # it may not be read
        return []


def _is_code(entry: os.DirEntry[str]) -> bool:
    return entry.name.startswith(".") or entry.name == _CODE_FOLDER


def _is_small_folder(entry: os.DirEntry[str]) -> bool:
    if not entry.is_dir(follow_symlinks=False) or _is_code(entry):
        return False
    return len(_entries(entry.path, MAX_OWN_ENTRIES + 1)) <= MAX_OWN_ENTRIES


def _is_inside(path: str, folder: str) -> bool:
    if path == folder:
        return True
    return path.startswith(folder.rstrip(os.sep) + os.sep)
