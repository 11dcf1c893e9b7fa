"""ProgramFolder: gives each coalition a working folder of its own, with the files from before the run."""

from __future__ import annotations

import os
import shutil
import tempfile
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from flsv.isolation.file_writes import (
    CHANGES,
    KeptFiles,
    is_large,
    remove,
    resolved,
    unwatch,
    unwatched,
    watch,
    watched,
)

#: If a folder beside or above the working folder has more entries than this, each is linked when it is opened.
MAX_NEIGHBORS = 200
#: The largest number of entries that are examined after a run to find files that were changed without a notice.
MAX_ENTRIES = 10_000
_PREFIX = "flsv-coalitions-"


class ProgramFolder:
    """The folders that a program works in, in their state at construction.

    A coalition works in a folder of links to the program's files. A link is replaced by a copy just before the file is
    written. Files that a coalition writes elsewhere are restored after its fit. Files that the run writes in the
    program's folders are copied before, so that coalitions have the old content.

    Args:
        further: other folders that the program writes into by absolute paths.

    Attributes:
        changed_files: files that a coalition or the run has changed, and that were too large to be copied before.
        shares_files: whether coalitions read files elsewhere that coalitions have written. Then no two coalitions may
            train at the same time.
    """

    _own_folder = ""
    shares_files = False

    def __init__(self, further: Sequence[str] = ()) -> None:
        self.path = os.getcwd()
        # {folder of the program: its path below a coalition's folder}
        self.locations = {self.path: ""}
        for folder in further:
            self._add_location(folder)
        _put_back_after_kills()
        self._process = os.getpid()

        # A temporary folder for copies of files, locked as long as this process lives.
        self._home, self._lock = _new_locked_folder(self)
        # Files of the program's folders that are newer than this folder were changed by the run.
        self._start_time = os.stat(self._home).st_ctime_ns
        self._files_of_run = KeptFiles(os.path.join(self._home, "run"))
        self._files_elsewhere = KeptFiles(os.path.join(self._home, "elsewhere"))

        # {path below a coalition's folder: target of its link}
        self._links: dict[str, str] = {}
        for folder, location in self.locations.items():
            for entry in _entries(folder):
                self._links[os.path.join(location, entry.name)] = entry.path
        # {path below a coalition's folder: (kind of the entry before the run, path of its copy)}
        self._originals: dict[str, tuple[str, str]] = {}
        # The entries of a coalition's folder in which it has written.
        self._changed_names: set[str] = set()
        self.changed_files: list[str] = []

    def _add_location(self, folder: str) -> None:
        """Let coalitions have a folder of their own in place of this one, which is outside of the working folder."""
        is_known = self._location(folder) is not None
        if is_known or _is_inside(self.path, folder):
            return
        location = f"folder_{len(self.locations)}"
        self.locations[folder] = location
        self.locations[os.path.realpath(folder)] = location

    def __getstate__(self) -> dict[str, object]:
        # A worker process creates a folder of its own.
        return {**vars(self), "_own_folder": "", "_lock": None}

    def _location(self, path: str) -> str | None:
        """Convert a path in one of the program's folders to the path below a coalition's folder. None: it is in none of
        them.
        """
        for folder, location in self.locations.items():
            if _is_inside(path, folder):
                relative_path = os.path.relpath(path, folder)
                return os.path.normpath(os.path.join(location, relative_path))
        return None

    # ---- the run

    def begin_run(self) -> None:
        """From now on until :meth:`end_run`, copy files in the program's folders before they are written."""
        watch(self._keep)

    def end_run(self) -> None:
        """Undo :meth:`begin_run`."""
        unwatch(self._keep)

    def _keep(self, path: str, access: str) -> None:
        if access == "read" or _is_inside(path, self._home):
            return
        real_path = os.path.realpath(path)
        for name in (path, resolved(path), real_path):
            if self._location(name) is not None:
                with suppress(
                    OSError
                ):  # without a copy, coalitions have the file as the run has written it
                    self._files_of_run.keep(name, access)

    def take_over_run(self) -> None:
        """Let coalitions have the files from before the run, if the run has written in the program's folders.

        Of files that were changed without a notice, coalitions have copies of the present content.
        """
        originals = self._files_of_run.originals()
        for path, (kind, _) in originals.items():
            self._files_of_run.kinds[path] = kind  # forked processes may have kept further files
        for path in self._files_changed_without_notice():
            originals[path] = "changed", path
        for path, original in originals.items():
            location = self._location(path) or ""
            self._originals[location] = original

    def _files_changed_without_notice(self) -> Iterator[str]:
        """Yield the files that were changed after this object was created, although :meth:`_keep` was not called."""
        pending = deque(self.locations)
        num_entries = 0
        while pending and num_entries < MAX_ENTRIES:
            for entry in _entries(pending.popleft()):
                num_entries += 1
                if entry.is_symlink() or entry.path in self._files_of_run.kinds:
                    continue
                if entry.is_dir():
                    pending.append(entry.path)
                elif entry.is_file() and entry.stat().st_ctime_ns >= self._start_time:
                    yield entry.path  # a socket or a pipe cannot be copied

    # ---- a coalition

    @contextmanager
    def entered(self) -> Iterator[str]:
        """Change the working folder to a coalition's folder in this context."""
        program_folder = os.getcwd()
        with unwatched():
            self._make_folder()
            self._make_links()
        os.chdir(self._own_folder)
        try:
            with watched(self._before_access):
                yield self._own_folder
        finally:
            os.chdir(program_folder)
            self.changed_files = []
            for files in (self._files_elsewhere, self._files_of_run):
                self.changed_files += [f"the file {path}" for path in files.changed_files()]
            # A worker's parent restores the files when no worker writes there any more.
            has_parent = self._is_at_worker and os.path.exists(self._home)
            if not has_parent:
                self.put_back()

    @property
    def _is_at_worker(self) -> bool:
        return os.getpid() != self._process

    def put_back(self) -> None:
        """Restore the files that coalitions have written elsewhere."""
        self._files_elsewhere.put_back()

    def _before_access(self, path: str, access: str) -> None:
        """Before a coalition writes a file: replace its link by a copy, or keep a file elsewhere to restore it."""
        if _is_inside(path, self._own_folder):
            if access != "read":
                self._make_own(os.path.relpath(path, self._own_folder), access)
            return
        self._link_neighbor(path)
        files = self._files_elsewhere
        if files.kinds and access in ("read", "update"):
            is_written = os.path.realpath(path) in files.kinds
            self.shares_files = self.shares_files or is_written
        files.keep_to_put_back(path, access)

    def _make_own(self, location: str, access: str) -> None:
        """Replace the links on a path below a coalition's folder. The last one is only replaced if its content is
        written.
        """
        names = Path(location).parts
        self._changed_names.update(names[:1])
        path = self._own_folder
        if access not in (*CHANGES, "tree"):
            names = names[:-1]
        for name in names:
            path = os.path.join(path, name)
            if os.path.islink(path):
                with FileLock(f"{self._root}.lock"):  # other threads and processes may do this, too
                    self._break_link(path, access)

    def _break_link(self, link: str, access: str) -> None:
        """Replace a link to a folder by a folder of links, and one to a file by a copy. A large file that is opened for
        an update may only be read: its link stays.
        """
        if not os.path.islink(link):
            return  # another thread has replaced it
        source = os.path.realpath(link)
        if _is_inside(source, self._own_folder):
            return  # the coalition itself has created the link
        if access == "update" and is_large(source):
            self._files_elsewhere.keep(source, access)
            return

        os.unlink(link)
        if os.path.isdir(source):
            os.mkdir(link)
            for entry in _entries(source):
                link_of_entry = os.path.join(link, entry.name)
                os.symlink(entry.path, link_of_entry)
            return
        loses_content = access == "overwrite"
        if os.path.exists(source) and not loses_content:
            shutil.copy2(source, link)

    # ---- the folder of coalitions

    def _make_folder(self) -> None:
        """Create a coalition's folder. The folders above it have links to the entries of the folders above the
        program's folder.
        """
        if self._own_folder:
            return
        home = _new_folder(self) if self._is_at_worker else self._home
        self._root = os.path.join(home, "root")
        self._own_folder = self._root + self.path
        os.makedirs(self._own_folder)
        for folder in Path(self.path).parents:
            neighbors = _entries(str(folder))
            if len(neighbors) > MAX_NEIGHBORS:
                continue  # each is linked when it is opened
            for entry in neighbors:
                link = self._root + entry.path
                if not os.path.exists(link):
                    os.symlink(entry.path, link)

    def _link_neighbor(self, path: str) -> None:
        """Create the missing link to a path beside or above a coalition's folder, if the path exists."""
        if not _is_inside(path, self._root):
            return
        link = self._root
        for name in Path(path).relative_to(self._root).parts:
            link = os.path.join(link, name)
            source = link.removeprefix(self._root)
            if os.path.lexists(link):
                continue
            if os.path.exists(source):
                os.symlink(source, link)
            return

    def _make_links(self) -> None:
        """Create the missing links of a coalition's folder, and the entries that the run has changed."""
        names_of_links = self._remove_changed_entries()
        for location in self.locations.values():
            folder = os.path.join(self._own_folder, location)
            os.makedirs(folder, exist_ok=True)
        for path, source in self._links.items():
            if path not in names_of_links:
                link = os.path.join(self._own_folder, path)
                os.symlink(source, link)
        for path, (kind, source) in self._originals.items():
            if kind == "folder":
                self._make_original_folder(path)
            else:
                self._make_original_file(path, kind, source)

    def _remove_changed_entries(self) -> set[str]:
        """Remove what the last coalition has left in its folder. Return the names of the links that stay."""
        names_of_links = set()
        for entry in _entries(self._own_folder):
            is_changed = entry.name in self._changed_names
            if entry.is_symlink() and not is_changed:
                names_of_links.add(entry.name)
            else:
                remove(entry.path)
        self._changed_names.clear()
        return names_of_links

    def _make_original_folder(self, path: str) -> None:
        """Create a folder that was there before the run, in the place of an entry that the run has made there."""
        self._make_own(path, "content")  # the links in it are replaced, too
        entry = os.path.join(self._own_folder, path)
        if not os.path.isdir(entry):
            remove(entry)
            os.makedirs(entry)

    def _make_original_file(self, path: str, kind: str, source: str) -> None:
        """Replace an entry that the run has changed by a link to ``source``, its copy from before the run. Without such
        a copy, ``source`` is the changed file, which is copied. What the run has created is removed.
        """
        self._make_own(path, "entry")
        entry = os.path.join(self._own_folder, path)
        is_there = os.path.lexists(entry)
        remove(entry)
        if kind == "changed" and is_there and os.path.isfile(source):
            shutil.copy2(source, entry)
        elif kind in ("file", "link"):
            os.symlink(source, entry)


def _new_folder(owner: ProgramFolder) -> str:
    """Create a folder that is removed together with its owner."""
    folder = os.path.realpath(tempfile.mkdtemp(prefix=_PREFIX))
    weakref.finalize(owner, _remove_unwatched, folder)
    return folder


def _new_locked_folder(owner: ProgramFolder) -> tuple[str, FileLock]:
    """Create a folder that is removed together with its owner, and acquire the lock in it. Until then another process
    may take it for the folder of a killed process and remove it.
    """
    while True:
        folder = _new_folder(owner)
        lock = FileLock(os.path.join(folder, "lock"))
        with suppress(FileNotFoundError):  # another process has removed the folder
            lock.acquire()
            if os.path.exists(lock.lock_file):
                return folder, lock
            lock.release()


def _remove_unwatched(folder: str) -> None:
    with unwatched():
        remove(folder)


def _put_back_after_kills() -> None:
    """Restore the files that coalitions of killed processes have written elsewhere."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        lock_file = folder / "lock"
        with suppress(OSError, Timeout):  # the folder is in use, or was just removed
            is_ours = folder.lstat().st_uid == os.getuid()
            if is_ours and lock_file.exists():
                with FileLock(lock_file, timeout=0):
                    KeptFiles(str(folder / "elsewhere")).put_back()
                    _remove_unwatched(str(folder))


def _entries(folder: str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except OSError:  # no permission to read it
        return []


def _is_inside(path: str, folder: str) -> bool:
    if path == folder:
        return True
    prefix = folder.rstrip(os.sep) + os.sep
    return path.startswith(prefix)
