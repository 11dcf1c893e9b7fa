"""Progress of long computations, reported to the listener attached last."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol


class Listener(Protocol):
    """Receiver of progress counts."""

    def show(self, what: str, done: int, total: int) -> None:
        """Show that ``done`` of ``total`` items are done."""

    def hide(self) -> None:
        """Stop showing the count, because the work is done or was given up."""


_lock = threading.RLock()
_listeners: list[Listener] = []
_work: list[tuple[str, int, int]] = []  # at most one: what, done, total


def attach(listener: Listener) -> None:
    """Report progress to this listener, until it is detached, and to no earlier one."""
    with _lock:
        _listeners.append(listener)


def detach(listener: Listener) -> None:
    """Stop reporting to a listener."""
    with _lock:
        if any(other is listener for other in _listeners):
            finish()
            _listeners[:] = [other for other in _listeners if other is not listener]


def start(what: str, total: int) -> None:
    """Begin work on at most ``total`` items called ``what``.

    Example:
        >>> class Print:
        ...     def show(self, what, done, total):
        ...         print(what, done, total)
        ...     def hide(self):
        ...         print("done")
        >>> listener = Print()
        >>> attach(listener)
        >>> start("coalitions", 3)
        coalitions 0 3
        >>> add_total("coalitions", 2)
        coalitions 0 3
        >>> advance()
        coalitions 1 3
        >>> detach(listener)
        done
        >>> advance()
    """
    with _lock:
        if _listeners:
            _work[:] = [(what, 0, total)]
            _tell()


def add_total(what: str, count: int) -> None:
    """Announce ``count`` further items of the current work."""
    with _lock:
        if not _listeners:
            return
        known, done, total = _work[0] if _work else (what, 0, 0)
        _work[:] = [(what, done, max(total, done + count)) if known == what else (what, 0, count)]
        _tell()


def advance(count: int = 1) -> None:
    """Report that ``count`` further items are done."""
    with _lock:
        if _listeners and _work:
            what, done, total = _work[0]
            _work[:] = [(what, min(done + count, total), total)]
            _tell()


def finish() -> None:
    """End the current work."""
    with _lock:
        if _work:
            _work.clear()
            if _listeners:
                _listeners[-1].hide()


@contextmanager
def muted() -> Iterator[None]:
    """Report no progress within this context.

    Example:
        >>> with muted():
        ...     start("coalitions", 2)
    """
    with _lock:
        listeners, _listeners[:] = list(_listeners), []
        try:
            yield
        finally:
            _listeners[:] = listeners


def _tell() -> None:
    _listeners[-1].show(*_work[0])
