"""own_folder: a folder that a process owns, and deletes at its end."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

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
    """Lock a folder for this process. Without ``wait``, raise OSError if it is locked."""
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
