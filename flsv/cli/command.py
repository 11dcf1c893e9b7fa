"""Parts that the commands share: a parser whose help is the module's docstring, and paths and tables. Imports
little."""

from __future__ import annotations

import argparse
import os
import re
import signal
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import FrameType
from typing import Any

from flsv.utilities.display import shown as shown

#: Arguments of ``flsv fit`` for fits that nobody watches.
NO_BARS = ("--trainer.enable_progress_bar=false", "--trainer.enable_model_summary=false")


class Terminated(KeyboardInterrupt):
    """SIGTERM, by which systemd, SLURM and torchrun stop a command: it ends as after Ctrl-C."""


def status_of(stop: KeyboardInterrupt) -> int:
    """Return the exit status of a command that was stopped: 128 and the signal's number, as shells say it."""
    return 128 + (signal.SIGTERM if isinstance(stop, Terminated) else signal.SIGINT)


@contextmanager
def terminable() -> Iterator[None]:
    """Raise :class:`Terminated` at the first SIGTERM, and ignore further ones: who stops a group of processes signals
    each of them, and rank 0 passes it on to those that it has started."""
    stops = [Terminated]
    usual = sys.unraisablehook

    def stop(number: int, frame: FrameType | None) -> None:
        if stops:
            raise stops.pop()

    def again(ignored: Any) -> None:
        """Raise it a moment later: within a ``__del__`` or a weak reference's callback, of which pictures have many, it
        is lost."""
        if ignored.exc_type is Terminated:
            stops.append(Terminated)
            threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGTERM)).start()
        else:
            usual(ignored)

    here = threading.current_thread() is threading.main_thread()  # others cannot handle signals
    before = signal.signal(signal.SIGTERM, stop) if here else None
    sys.unraisablehook = again
    try:
        yield
    finally:
        sys.unraisablehook = usual
        if here:
            signal.signal(signal.SIGTERM, before)


_ROLE = re.compile(r":\w+:`~?([^`]*)`")


def plain(text: str) -> str:
    """Remove roles and double backticks from a docstring's text.

    Example:
        >>> plain("``--tests``: see :func:`flsv.functional.wasserstein`")
        '--tests: see flsv.functional.wasserstein'
    """
    return _ROLE.sub(r"\1", text).replace("``", "")


def filled(text: str, width: int) -> str:
    """Fill paragraphs to a width; what is indented (commands) stays as it is.

    Example:
        >>> print(filled("One two\\nthree.\\n\\n    flsv  fit", 9))
        One two
        three.
        <BLANKLINE>
            flsv  fit
    """
    paragraphs = plain(text).strip("\n").split("\n\n")
    return "\n\n".join(each if each.startswith(" ") else textwrap.fill(each, width) for each in paragraphs)


class TextHelp(argparse.HelpFormatter):
    """Formatter of the help of a command whose description is its module's docstring."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return textwrap.indent(filled(text, width - len(indent)), indent)

    def _expand_help(self, action: argparse.Action) -> str:
        return plain(super()._expand_help(action))

    def start_section(self, heading: str | None) -> None:
        super().start_section(None if heading is None else filled(heading, self._width - 1))


def command_parser(prog: str, description: str | None, epilog: str | None = None) -> argparse.ArgumentParser:
    """Make an ``ArgumentParser`` with :class:`TextHelp` that takes no option by its first letters."""
    return argparse.ArgumentParser(
        prog, description=description, epilog=epilog, formatter_class=TextHelp, allow_abbrev=False
    )


class Waiting:
    """A line on the terminal that says what is waited for, and gets a dot every second, until :meth:`end`.

    Args:
        what: the thing that is waited for.
    """

    def __init__(self, what: str) -> None:
        self._over = threading.Event()
        self._dots = threading.Thread(target=self._add_dots, daemon=True)
        print(what, end="", file=sys.stderr, flush=True)
        self._dots.start()

    def _add_dots(self) -> None:
        while not self._over.wait(1.0):
            print(".", end="", file=sys.stderr, flush=True)

    def end(self) -> None:
        """End the line; a second call does nothing."""
        if not self._over.is_set():
            self._over.set()
            self._dots.join()
            print(file=sys.stderr, flush=True)


def printer(quiet: bool) -> Callable[[str], None]:
    """Return a ``print`` that flushes; one that prints nothing when quiet."""
    return (lambda text: None) if quiet else partial(print, flush=True)
