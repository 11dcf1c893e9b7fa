"""Ranks end with the process that started them.

Ranks that have met hold lifelines. Before that a rank whose parent is killed would wait for the others, with all that
it has imported and read, until the time to meet is over.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache

_STARTED_BY = "FLSV_STARTED_BY"
#: Seconds between two looks at the parent.
_INTERVAL = 0.5

#: Set when the ranks hold lifelines: who has started some of them is a rank, and may be done before they are.
met = threading.Event()


@contextmanager
def told_to_children() -> Iterator[None]:
    """Processes that are started within it know that it is this one that starts them, even if it is gone when they
    look."""
    os.environ[_STARTED_BY] = str(os.getpid())
    try:
        yield
    finally:
        del os.environ[_STARTED_BY]


@cache
def end_with_parent() -> None:
    """From now on this process ends within a second after the one that has started it as a rank: a rank of a Trainer,
    until they have met, or torchrun's agent, for good. In other processes nothing happens."""
    started_by = os.environ.pop(_STARTED_BY, None)  # not for those that this one starts
    if os.name != "posix":  # elsewhere a process keeps the number of a parent that is gone
        return
    if started_by is not None:
        _watch(int(started_by), met.wait)
    elif "TORCHELASTIC_RUN_ID" in os.environ:
        _watch(os.getppid(), threading.Event().wait)


def _watch(parent: int, over: Callable[[float], bool]) -> None:
    def watch() -> None:
        while os.getppid() == parent:
            if over(_INTERVAL):
                return
        print(f"this rank ends: process {parent}, which has started it, is gone.", file=sys.stderr, flush=True)
        os._exit(1)

    threading.Thread(target=watch, name="flsv-parent", daemon=True).start()
