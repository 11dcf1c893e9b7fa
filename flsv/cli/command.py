"""Functions that all commands use: parsers whose help is a module's docstring, signals and warnings. The module imports
little, so that commands start fast."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import textwrap
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from flsv.utilities.display import display_path as display_path
from flsv.utilities.display import plain

#: Arguments of ``flsv fit`` that hide progress bars and the model's summary.
NO_BARS = ("--trainer.enable_progress_bar=false", "--trainer.enable_model_summary=false")


class Terminated(KeyboardInterrupt):
    """Exception at SIGTERM, with which systemd, SLURM and torchrun stop a command; it then ends as after Ctrl-C."""


def status_of(stop: KeyboardInterrupt) -> int:
    """Return the exit status of a stopped command, as shells define it: 128 plus the signal's number."""
    return 128 + (signal.SIGTERM if isinstance(stop, Terminated) else signal.SIGINT)


@contextmanager
def terminable() -> Iterator[None]:
    """Raise :class:`Terminated` at the first SIGTERM within this context, and ignore further ones."""
    # A process group is stopped by a signal to each of its processes, and rank 0 passes its own on to the others.
    stops = [Terminated]
    usual = sys.unraisablehook

    def stop(number: int, frame: FrameType | None) -> None:
        if stops:
            raise stops.pop()

    def again(ignored: Any) -> None:
        # Python ignores what is raised in a __del__ or a weak reference's callback, of which matplotlib has many.
        if ignored.exc_type is Terminated:
            stops.append(Terminated)
            threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGTERM)).start()
        else:
            usual(ignored)

    here = threading.current_thread() is threading.main_thread()  # other threads cannot handle signals
    before = signal.signal(signal.SIGTERM, stop) if here else None
    sys.unraisablehook = again
    try:
        yield
    finally:
        sys.unraisablehook = usual
        if here:
            signal.signal(signal.SIGTERM, before)


#: Modules with functions that give warnings on behalf of other modules.
_GIVE_WARNINGS = ("warnings", "lightning_utilities.core.rank_zero", "lightning.fabric.utilities.rank_zero")


@contextmanager
def one_line_warnings() -> Iterator[None]:
    """Show flsv's own warnings as one line within this context, without the place in the code."""
    shown = warnings.showwarning

    def show(message: Warning | str, category: type[Warning], *where: Any, **options: Any) -> None:
        usual = warnings.formatwarning  # Lightning replaces it when it is imported
        if issubclass(category, UserWarning) and _origin().split(".")[0] == "flsv":
            warnings.formatwarning = lambda text, *_, **__: f"flsv: warning: {text}\n"
        try:
            shown(message, category, *where, **options)
        finally:
            warnings.formatwarning = usual

    warnings.showwarning = show
    try:
        yield
    finally:
        warnings.showwarning = shown


def _origin() -> str:
    """Return the name of the module that is giving a warning."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_globals.get("__name__") in (*_GIVE_WARNINGS, __name__):
        frame = frame.f_back
    return "" if frame is None else str(frame.f_globals.get("__name__"))


def filled(text: str, width: int) -> str:
    """Return a text with its paragraphs filled to a width; indented paragraphs (commands) are not changed.

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
    """Formatter of a command's help, for commands whose description is their module's docstring."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return textwrap.indent(filled(text, width - len(indent)), indent)

    def _expand_help(self, action: argparse.Action) -> str:
        return plain(super()._expand_help(action))

    def start_section(self, heading: str | None) -> None:
        super().start_section(None if heading is None else filled(heading, self._width - 1))


def command_parser(prog: str, description: str | None, epilog: str | None = None) -> argparse.ArgumentParser:
    """Return an ``ArgumentParser`` with :class:`TextHelp` that accepts no abbreviated options."""
    return argparse.ArgumentParser(
        prog, description=description, epilog=epilog, formatter_class=TextHelp, allow_abbrev=False
    )


def from_1(text: str) -> int:
    """Parse a whole number from 1 on."""
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text}: expected a whole number of at least 1")
    return int(text)


def printer(quiet: bool) -> Callable[[str], None]:
    """Return a function that prints a text at once; if ``quiet``, it does nothing."""
    return (lambda text: None) if quiet else lambda text: print(text, flush=True)
