"""Files that are written completely or not at all, even if the process is killed, and a lock on a folder of them."""

from __future__ import annotations

import errno
import json
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import IO, Any

from filelock import FileLock, Timeout

from flsv.utilities.errors import ConfigurationError, Refused


def check_writable(folder: Path) -> None:
    """Raise an error unless files can be written into a folder. It need not exist yet."""
    existing_folder = folder.absolute()
    while not existing_folder.exists():
        existing_folder = existing_folder.parent
    try:
        with tempfile.TemporaryFile(dir=existing_folder):
            return
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise ConfigurationError(
            f"nothing can be written into {folder}: {error.strerror}. Name another folder, or make this one writable."
        ) from error


def folders_to_make(folder: Path) -> list[Path]:
    """Return a folder and its parents, the innermost first, as far as they do not exist."""
    return [path for path in (folder, *folder.parents) if not path.exists()]


def remove_empty(folders: Iterable[Path]) -> None:
    """Remove folders, the innermost first, up to the first that holds something."""
    with suppress(OSError):
        for folder in folders:
            folder.rmdir()


@contextmanager
def replacing(path: Path, private: bool = False) -> Iterator[IO[bytes]]:
    """Open a temporary file that replaces ``path`` when the context ends without an error.

    With ``private``, only its owner can read it.
    """
    # In the same folder, so on the same file system, where a move is atomic.
    draft = path.with_name(f".{path.name}.tmp")
    try:
        with draft.open("wb") as file:
            if private:
                os.chmod(draft, 0o600)  # before there is anything to read
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
    except BaseException as error:
        with suppress(OSError):
            draft.unlink(missing_ok=True)
        raise _add_path(error, path) from error
    _sync_folder(path.parent)


@contextmanager
def locked_json(
    path: Path,
    empty: Mapping[str, Any],
    is_valid: Callable[[Any], bool],
    how_to_write: str,
) -> Iterator[dict[str, Any]]:
    """Yield the entries of a site's JSON file, which no other process reads meanwhile, and write them, unless there is
    an error.

    Args:
        path: the file, in a folder that exists.
        empty: the entries of a file that is not there.
        is_valid: a function that returns whether a value of JSON types can be the file's content.
        how_to_write: advice, after "Write it again ", for a file that cannot be read.

    Raises:
        Refused: the file is a link or a folder, cannot be parsed, or is not valid. The text, which the server gets, has
            no path.
    """
    with FileLock(f"{path}.lock"):
        try:
            entries = _read_valid(path, empty, is_valid)
        except (ValueError, RecursionError) as error:
            raise Refused(
                f"its {path.name} cannot be read. Write it again {how_to_write}; a backup forgets what came after it"
            ) from error
        yield entries
        with replacing(path, private=True) as file:
            file.write(json.dumps(entries).encode())


def _read_valid(
    path: Path, empty: Mapping[str, Any], is_valid: Callable[[Any], bool]
) -> dict[str, Any]:
    """Return the entries of a JSON file, or raise ValueError, whose text only the site's own log has."""
    if (
        path.is_symlink()
    ):  # writing would replace the link, and a broken one would look like no file
        raise ValueError(f"{path} is a link")
    if not path.exists():
        return dict(empty)
    if path.is_dir():
        raise ValueError(f"{path} is a folder")
    content = json.loads(path.read_text(encoding="utf-8"))
    if not is_valid(content):
        raise ValueError(f"{path} holds {content!r:.200}")
    entries: dict[str, Any] = content
    return entries


def write_json(path: Path, entries: Mapping[str, Any]) -> None:
    """Write a JSON file, and replace an earlier one."""
    with replacing(path) as file:
        file.write(json.dumps(dict(entries), indent=1).encode())


def set_aside(path: Path) -> Path:
    """Rename a file to its name and the first free number, and return its new path."""
    return path.rename(numbered(path))


def numbered(path: Path) -> Path:
    """Return the path of a file that is not there: the name of ``path`` and the first free number."""
    for number in count(1):
        new_path = path.with_name(f"{path.stem}_{number}{path.suffix}")
        if not new_path.exists():
            break
    return new_path


def append(path: Path, data: bytes) -> None:
    """Append ``data`` to an existing file, or undo the append if it fails."""
    with path.open("r+b", buffering=0) as file:
        end = file.seek(0, os.SEEK_END)
        try:
            unwritten = memoryview(data)
            while unwritten:
                num_written = file.write(unwritten)
                unwritten = unwritten[num_written:]
            os.fsync(file.fileno())
        except BaseException as error:
            with suppress(OSError):
                file.truncate(end)
            raise _add_path(error, path) from error


def whole_lines(path: Path) -> list[str]:
    """Read a text file's lines, except a last line without its line end."""
    lines = []
    complete_lines = path.read_bytes().split(b"\n")[:-1]
    for number, line in enumerate(complete_lines, 1):
        try:
            text = line.removesuffix(b"\r").decode()
        except UnicodeDecodeError as error:
            raise ConfigurationError(
                f"{path}, line {number}: {error}; expected text in UTF-8."
            ) from None
        if "\0" in text:
            raise ConfigurationError(
                f"{path}, line {number}: there is a zero byte in it; expected text in UTF-8."
            )
        lines.append(text)
    return lines


def _add_path(error: BaseException, path: Path) -> BaseException:
    """Return an OSError with the file's name, other errors unchanged."""
    if isinstance(error, RuntimeError) and isinstance(error.__context__, OSError):
        error = error.__context__  # torch.save raises an error of its own after that of the file
    if not isinstance(error, OSError):
        return error
    reason = error.strerror or str(error)
    return OSError(error.errno, reason, str(path))


def _sync_folder(folder: Path) -> None:
    """Flush a folder to the disk, so that moves survive a power cut."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


#: Seconds to wait for another process that is about to release the folder.
LOCK_TIMEOUT_S = 1.0


class FolderLock:
    """Lock on ``.lock`` in a folder, or on the file ``name``, until :meth:`release` or the end of the process.

    A folder that did not exist, and in which nothing was written, is removed.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> lock = FolderLock(folder)
        >>> FolderLock(folder)  # doctest: +ELLIPSIS
        Traceback (most recent call last):
            ...
        flsv.utilities.errors.ConfigurationError: another run is writing into ...
        >>> lock.release()
        >>> FolderLock(folder).release()
    """

    def __init__(self, folder: Path, name: str = ".lock") -> None:
        check_writable(folder)
        self._folder = folder
        self._path = folder / name
        self._new_folders = folders_to_make(folder)
        folder.mkdir(parents=True, exist_ok=True)
        self._lock = FileLock(self._path, timeout=LOCK_TIMEOUT_S, thread_local=False)
        try:
            self._lock.acquire()
        except Timeout:
            raise ConfigurationError(
                f"another run is writing into {folder}: wait for its end, or give this run a folder of its own "
                "(--out, --trainer.default_root_dir, or the logger's name)."
            ) from None

    def __enter__(self) -> FolderLock:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def release(self) -> None:
        """Release the folder for other runs. A second call does nothing."""
        is_first_release = self._lock.is_locked
        if is_first_release and self._new_folders and [*self._folder.glob("*")] == [self._path]:
            self._path.unlink()
            remove_empty(self._new_folders)
        self._lock.release()
