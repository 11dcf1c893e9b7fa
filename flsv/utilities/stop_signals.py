"""Signals that stop a program: SIGTERM, and SIGINT of Ctrl-C.

Python calls a signal's handler between any two instructions. An error that the handler raises may interrupt a
``queue.Queue`` between waking its reader and striking it off the list of those that wait. The next value then wakes
nobody. So a program that closed TensorBoard's writer waited for it for two minutes. During a fit the handler therefore
only notes the first signal, and the error is raised between two batches.
"""
# The module imports little, so that commands start fast.

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

#: Seconds after which a noted signal raises its error even in the middle of a batch.
MAX_SECONDS_OF_BATCH = 2.0
#: Seconds in which SIGTERM that is received twice counts once. A process may get one that was sent to its process
#: group, and one that rank 0 passes on.
SECONDS_OF_ONE_SIGNAL = 1.0
#: Seconds after which an error that Python has ignored is raised again.
SECONDS_TO_NEXT_ERROR = 0.1
#: Windows has none. There the error of a noted signal is raised between batches or by a second signal.
_HAS_TIMER = hasattr(signal, "setitimer")


class Terminated(KeyboardInterrupt):
    """Exception raised at SIGTERM, with which systemd, SLURM and torchrun stop a command."""


_ERROR_BY_SIGNAL: dict[int, type[KeyboardInterrupt]] = {
    signal.SIGTERM: Terminated,
    signal.SIGINT: KeyboardInterrupt,
}


class _StopSignals:
    """The signals that a process has received, and when it raises their errors."""

    def __init__(self) -> None:
        #: Whether the first signal is only noted.
        self.waits_for_batch = False
        self._noted_signal: int | None = None
        self._noted_at = 0.0
        self._was_raised = False
        self.was_terminated = False
        self._previous_hook = sys.unraisablehook

    def receive(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGTERM and self.was_terminated:
            return
        if self._noted_signal is None and self.waits_for_batch and not self._was_raised:
            self._note(number, MAX_SECONDS_OF_BATCH)
            return
        seconds_since_noted = time.monotonic() - self._noted_at
        if number == signal.SIGTERM and seconds_since_noted < SECONDS_OF_ONE_SIGNAL:
            return
        self._raise(number)

    def _note(self, number: int, seconds: float) -> None:
        self._noted_signal = number
        self._noted_at = time.monotonic()
        _set_timer(seconds)

    def _raise(self, number: int) -> None:
        _set_timer(0)
        self._noted_signal = None
        self._was_raised = True
        if number == signal.SIGTERM:
            self.was_terminated = True
        raise _ERROR_BY_SIGNAL[number]

    def raise_noted(self, *_: Any) -> None:
        if self._noted_signal is not None:
            self._raise(self._noted_signal)

    def raise_again(self, unraisable: Any) -> None:
        # Python ignores an error in a __del__ or in the callback of a weak reference (matplotlib has many), but calls
        # this hook. A moment later the process probably runs other code, in which the error is raised.
        for number, error in _ERROR_BY_SIGNAL.items():
            if unraisable.exc_type is error:
                self._note(number, SECONDS_TO_NEXT_ERROR)
                return
        self._previous_hook(unraisable)


#: None outside of :func:`terminable`.
_signals: _StopSignals | None = None


@contextmanager
def terminable() -> Iterator[None]:
    """Raise :class:`Terminated` at the first SIGTERM within this context, and ignore further ones. In
    :func:`stopping_between_batches`, this and Ctrl-C wait for the end of a batch.
    """
    global _signals
    if not _is_main_thread():  # others cannot handle signals
        yield
        return

    signals = _StopSignals()
    handlers: dict[int, Callable[..., None]] = {signal.SIGTERM: signals.receive}
    if _HAS_TIMER:
        handlers[signal.SIGALRM] = signals.raise_noted
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # it may be ignored
        handlers[signal.SIGINT] = signals.receive
    previous_handlers = {
        number: signal.signal(number, handler) for number, handler in handlers.items()
    }
    previous_hook = sys.unraisablehook
    sys.unraisablehook = signals.raise_again
    _signals = signals
    try:
        yield
    finally:
        _set_timer(0)
        _signals = None
        sys.unraisablehook = previous_hook
        for number, handler in previous_handlers.items():
            signal.signal(number, handler)


@contextmanager
def stopping_between_batches() -> Iterator[None]:
    """Only note the first signal within this context. Its error is raised by :func:`stop_if_signaled`, at the latest at
    the end of the context, or by a second signal or two seconds later wherever the program is.
    """
    if _signals is None or not _is_main_thread():
        yield
        return
    _signals.waits_for_batch = True
    try:
        yield
    finally:
        _signals.waits_for_batch = False
        _signals.raise_noted()


def stop_if_signaled() -> None:
    """Raise the error of a signal that was noted. This is called between two batches."""
    if _signals is not None and _is_main_thread():
        _signals.raise_noted()


def error_of_stop() -> KeyboardInterrupt:
    """Return the error that ends a command after a fit that a signal has cut short without an error: that of SIGTERM if
    it was received, and otherwise that of Ctrl-C.
    """
    was_terminated = _signals is not None and _signals.was_terminated
    return Terminated() if was_terminated else KeyboardInterrupt()


def begin_to_stop() -> None:
    """Raise no error until :func:`stopping_between_batches` ends, since the fit is ending by another one."""
    if _signals is not None and _is_main_thread():
        _set_timer(0)


def _set_timer(seconds: float) -> None:
    """Let the system send SIGALRM after this time, or with 0 never. It needs no lock, which the code that a signal has
    interrupted could hold.
    """
    if _HAS_TIMER:
        signal.setitimer(signal.ITIMER_REAL, seconds)


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
