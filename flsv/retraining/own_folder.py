"""ProgramFolder: a program's folders as they were at one time, of which each coalition gets a copy to work in."""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

#: The most bytes and files of which coalitions have copies, those that were written last. Others are links.
MAX_COPIED_BYTES = 2**30
MAX_COPIED_FILES = 100
#: The most entries that are looked at. Folders beyond are links.
MAX_ENTRIES = 100_000
#: Folders, beside hidden ones, and files that are always links.
_CODE_FOLDER = "__pycache__"
_CODE_SUFFIXES = (".py", ".pyc", ".pyi", ".typed")
#: Inode, size and time of a file, by which a change is noticed. Of a folder that it is one.
Signature = tuple[int, ...]


class ProgramFolder:
    """The folders that a program works in, as they are now.

    A coalition sees the working folder, the folders beside and above it, and further folders. In the working folder
    and the further ones folders are made, and files are copies, or links if they are large or many. So what it writes
    there by a relative path is its own.

    Args:
        further: folders elsewhere that the program writes into by absolute paths.

    Attributes:
        changed_files: files of the program that changed while a coalition trained, by it or by another program.
    """

    def __init__(self, further: Sequence[str] = ()) -> None:
        self.path = os.getcwd()
        # {a folder: its path below a coalition's folder}
        self.locations = {self.path: ""}
        for folder in further:
            is_inside = any(_is_inside(folder, location) for location in self.locations)
            if not is_inside and not _is_inside(self.path, folder):
                self.locations[folder] = f"folder_{len(self.locations)}"

        # How entries of a coalition's folder are made, by path: folders, links to a source, copies of a source.
        self._folders: list[str] = []
        self._links: dict[str, str] = {}
        self._copies: dict[str, str] = {}
        self._num_entries = 0
        # {path: entry}
        files: dict[str, os.DirEntry[str]] = {}
        for folder, location in self.locations.items():
            if location:
                self._folders.append(location)
            real_path = os.path.realpath(folder)
            files |= self._files_in(folder, location, inside=(real_path,))

        self._home: str | None = self._new_folder()
        self._copy_latest(files, Path(self._home, "copies"))
        self._own_folder: Path | None = None
        self.changed_files: list[str] = []

    def __getstate__(self) -> dict[str, object]:
        # For a worker, which makes a folder of its own.
        return {**vars(self), "_home": None, "_own_folder": None}

    def _files_in(
        self,
        folder: str,
        location: str,
        inside: tuple[str, ...],
    ) -> dict[str, os.DirEntry[str]]:
        """Return the files in a folder and below, and note folders and links. ``inside`` are the folders around."""
        files: dict[str, os.DirEntry[str]] = {}
        for entry in _entries(folder):
            self._num_entries += 1
            path = os.path.join(location, entry.name)
            try:
                is_folder = entry.is_dir()
                entry.stat()
            except OSError:  # a link that leads nowhere
                continue

            if is_folder:
                real_path = os.path.realpath(entry.path)
                is_hidden = entry.name.startswith(".") or entry.name == _CODE_FOLDER
                is_beyond = self._num_entries > MAX_ENTRIES
                if is_hidden or real_path in inside or is_beyond:
                    self._links[path] = entry.path
                else:
                    self._folders.append(path)
                    files |= self._files_in(entry.path, path, inside=(*inside, real_path))
            elif entry.is_file() and not entry.name.endswith(_CODE_SUFFIXES):
                files[path] = entry
            else:
                self._links[path] = entry.path
        return files

    def _copy_latest(
        self,
        files: Mapping[str, os.DirEntry[str]],
        copies_folder: Path,
    ) -> None:
        """Copy the files that were written last. Coalitions have links to the others."""
        copies_folder.mkdir()
        num_bytes = 0
        for path in sorted(files, key=lambda path: _time_of(files[path]), reverse=True):
            entry = files[path]
            num_bytes_with_file = num_bytes + entry.stat().st_size
            has_all_files = len(self._copies) == MAX_COPIED_FILES
            if has_all_files or num_bytes_with_file > MAX_COPIED_BYTES:
                self._links[path] = entry.path
                continue

            target = copies_folder / str(len(self._copies))
            try:
                shutil.copy2(entry.path, target)
            except OSError:  # it may not be read, or has gone
                continue
            num_bytes = num_bytes_with_file
            self._copies[path] = str(target)

    @contextmanager
    def entered(self) -> Iterator[str]:
        """Work in a coalition's folder. At the end :attr:`changed_files` names what has been written by a link."""
        program_folder = os.getcwd()
        if self._own_folder is None:
            self._make()
        assert self._own_folder is not None

        self.changed_files = []
        linked_files = self._signatures_of_sources()
        os.chdir(self._own_folder)
        try:
            yield str(self._own_folder)
        finally:
            os.chdir(program_folder)
            unchanged_paths = set(self._unchanged_in(str(self._own_folder), location=""))
            for path in self._signatures:
                if path not in unchanged_paths:
                    self._make_entry(path)

        for path, signature in self._signatures_of_sources().items():
            if linked_files.get(path) != signature:
                self.changed_files.append(f"the file {path}")

    def _new_folder(self) -> str:
        """Make a folder that goes with this object."""
        folder = tempfile.mkdtemp(prefix="flsv-coalitions-")
        weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        return folder

    def _make(self) -> None:
        """Make a coalition's folder, below folders that hold links to what is beside the program's folder."""
        if self._home is None:  # at a worker
            self._home = self._new_folder()

        parent = Path(self._home, "root")
        parent.mkdir()
        present_folder = os.sep
        names = Path(self.path).parts[1:] or [""]
        for name in names:
            for entry in _entries(present_folder):
                if entry.name != name:
                    os.symlink(entry.path, parent / entry.name)
            present_folder = os.path.join(present_folder, name)
            parent = parent / name
            parent.mkdir(exist_ok=True)

        self._signatures: dict[str, Signature | None] = {}
        self._own_folder = parent
        for path in (*self._folders, *self._links, *self._copies):
            self._make_entry(path)

    def _make_entry(self, path: str) -> None:
        target = os.path.join(str(self._own_folder), path)
        if path in self._links:
            os.symlink(self._links[path], target)
        elif path not in self._copies:
            os.mkdir(target)
        elif os.path.exists(self._copies[path]):  # not at a worker on another machine
            shutil.copy2(self._copies[path], target)
        self._signatures[path] = _signature(target)

    def _unchanged_in(self, folder: str, location: str) -> Iterator[str]:
        """Yield the paths of a folder's entries that are as they were made. Others are removed."""
        for entry in _entries(folder):
            path = os.path.join(location, entry.name)
            if self._signatures.get(path) != _signature(entry.path):
                _remove(entry.path)
                continue
            yield path
            if entry.is_dir(follow_symlinks=False):
                yield from self._unchanged_in(entry.path, path)

    def _signatures_of_sources(self) -> dict[str, Signature | None]:
        """Return the signatures of files to which there are links."""
        signatures = {}
        for source in self._links.values():
            signatures[source] = _signature(source, os.stat)
        return signatures


def _signature(
    path: str,
    status_of: Callable[[str], os.stat_result] = os.lstat,
) -> Signature | None:
    """Return by what a change of an entry is noticed, None if it is not there."""
    try:
        status = status_of(path)
    except OSError:
        return None
    if stat.S_ISDIR(status.st_mode):
        return (0,)
    return (
        status.st_ino,
        status.st_size,
        status.st_mtime_ns,
    )


def _time_of(entry: os.DirEntry[str]) -> int:
    status = entry.stat()
    return max(status.st_mtime_ns, status.st_ctime_ns)


def _remove(path: str) -> None:
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path, ignore_errors=True)
    else:
        os.unlink(path)


def _entries(folder: str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except OSError:  # it may not be read
        return []


def _is_inside(path: str, folder: str) -> bool:
    if path == folder:
        return True
    return path.startswith(folder.rstrip(os.sep) + os.sep)
