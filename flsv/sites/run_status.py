"""The status of a run with remote sites, in a file that scripts read."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from flsv.utilities.atomic_files import FolderLock, replacing


class Stopped(Exception):
    """Error: the network's operator ends the run, which its next start continues."""


@contextmanager
def run_status(folder: Path, run: str | None = None) -> Iterator[Callable[[str | None], None]]:
    """Write a run's status into ``status.json``, and yield a function that adds an explanation to it.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> with run_status(folder):
        ...     json.loads((folder / "status.json").read_text())["status"]
        'running'
        >>> json.loads((folder / "status.json").read_text())["status"]
        'finished'
    """
    # A killed process leaves "running". An operator's "stopped" stays, although the server ends later.
    lock = FolderLock(folder, ".status.lock")  # the run locks the folder itself later
    write_status = partial(_write_status, folder, run, datetime.now(UTC))
    last_explanation: str | None = None

    def explain(explanation: str | None) -> None:
        nonlocal last_explanation
        last_explanation = explanation
        write_status("running", explanation)

    try:
        write_status("running")
        yield explain
        write_status("finished", last_explanation)
    except Stopped as error:
        write_status("stopped", str(error))
        raise
    # Not the SystemExit with which Flower ends an app whose SuperLink is gone.
    except Exception as error:
        write_status("failed", f"{type(error).__name__}: {error}")
        raise
    finally:
        lock.release()


def _write_status(
    folder: Path,
    run: str | None,
    start_time: datetime,
    status: str,
    explanation: str | None = None,
) -> None:
    path = folder / "status.json"
    if run is not None and _was_stopped(run, path):
        return
    time_of_status = start_time if status == "running" else datetime.now(UTC)
    since = time_of_status.isoformat(timespec="seconds")
    fields = {"status": status, "since": since, "why": explanation, "run": run}
    with replacing(path) as file:
        file.write(json.dumps(fields, indent=1).encode())
    if status != "running":
        print(f"flsv: the run has {status}: {explanation or folder}.", file=sys.stderr, flush=True)


def _was_stopped(run: str, path: Path) -> bool:
    """Return whether an operator has stopped the run, which keeps this status."""
    try:
        status = json.loads(path.read_bytes())
    except (OSError, ValueError):  # there is none, or not one of a run
        return False
    return isinstance(status, dict) and (status.get("run"), status.get("status")) == (
        run,
        "stopped",
    )
