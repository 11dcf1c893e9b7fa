"""``status.json``: the state of a server's run, for supervisors."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path

from flsv._lightning.durable import replacing


@contextmanager
def told_status(folder: Path) -> Iterator[None]:
    """Say in a folder's ``status.json`` how what is done within ends: ``"running"``, then ``"finished"`` or
    ``"failed"`` and why. A run that was killed stays ``"running"``, since when it says.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> with told_status(folder):
        ...     json.loads((folder / "status.json").read_text())["status"]
        'running'
        >>> json.loads((folder / "status.json").read_text())["status"]
        'finished'
    """
    path = folder / "status.json"
    _write(path, "running")
    try:
        yield
    except BaseException as error:
        why = f"{type(error).__name__}: {error}"
        _write(path, "failed", why)
        said = f"flsv: the run has failed: {why}. See {path}."
        if hasattr(error, "add_note"):  # from Python 3.11 on: the last line of its traceback
            error.add_note(said)
        else:
            print(said, file=sys.stderr, flush=True)
        raise
    _write(path, "finished")
    print(f"flsv: the run has finished. See {path}.", file=sys.stderr, flush=True)


def _write(path: Path, status: str, why: str | None = None) -> None:
    when = datetime.now(timezone.utc).isoformat(timespec="seconds")
    with replacing(path) as file:
        file.write(json.dumps({"status": status, "since": when, "why": why}, indent=1).encode())
