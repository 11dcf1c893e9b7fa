"""Functions that all commands use: parsers whose help is a module's docstring, handling of signals, and output while
the user waits. The module imports little, so that commands start fast."""

from __future__ import annotations

import argparse
import atexit
import gc
import os
import re
import signal
import sys
import textwrap
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NoReturn

from flsv.utilities import progress
from flsv.utilities.display import display_path as display_path

#: Arguments of ``flsv fit`` that hide progress bars and the model's summary.
NO_BARS = ("--trainer.enable_progress_bar=false", "--trainer.enable_model_summary=false")


class Terminated(KeyboardInterrupt):
    """Exception at SIGTERM, with which systemd, SLURM and torchrun stop a command; it then ends as after Ctrl-C."""


def status_of(stop: KeyboardInterrupt) -> int:
    """Return the exit status of a stopped command, as shells define it: 128 plus the signal's number."""
    return 128 + (signal.SIGTERM if isinstance(stop, Terminated) else signal.SIGINT)


@contextmanager
def importing() -> Iterator[None]:
    """Import torch and Lightning within this context without looking for garbage, where they are not imported yet.

    What is imported stays to the end, and to look through its million objects again and again would take a third of
    the time of a command's start.
    """
    first = "torch" not in sys.modules and gc.isenabled()
    if first:
        gc.disable()
    try:
        yield
    finally:
        if first:
            gc.freeze()
            gc.enable()
            atexit.register(gc.unfreeze)  # else triton tells of leaks


@contextmanager
def terminable() -> Iterator[None]:
    """Raise :class:`Terminated` at the first SIGTERM within this context, and ignore further ones.

    Several signals may arrive, because a process group is stopped by a signal to each of its processes, and rank 0 also
    passes its signal on to the processes that it has started.
    """
    stops = [Terminated]
    usual = sys.unraisablehook

    def stop(number: int, frame: FrameType | None) -> None:
        if stops:
            raise stops.pop()

    def again(ignored: Any) -> None:
        """Send SIGTERM again a moment later if :class:`Terminated` was raised where Python ignores exceptions: in a
        ``__del__``, or in the callback of a weak reference, of which matplotlib has many."""
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
    """Show flsv's own warnings as one line within this context, without the place in the code, which users of a command
    do not need; show warnings of other packages and of the user's own modules as usual."""
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


_ROLE = re.compile(r":\w+:`~?([^`]*)`")


def plain(text: str) -> str:
    """Return a docstring's text without roles and double backticks.

    Example:
        >>> plain("``--tests``: see :func:`flsv.functional.wasserstein`")
        '--tests: see flsv.functional.wasserstein'
    """
    return _ROLE.sub(r"\1", text).replace("``", "")


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


_NUMBER = re.compile(r"[-+]?(\d+([.,]\d*)?|[.,]\d+)([eE][-+]?\d+)?")


def number_hint(wrong: str) -> str:
    """Return ". Did you mean ...?" with the number with which a text begins; "" if it begins with no number, or is a
    number.

    Example:
        >>> number_hint("0.1x"), number_hint("0,1"), number_hint("much")
        ('. Did you mean 0.1?', '. Did you mean 0.1?', '')
    """
    found = _NUMBER.match(wrong)
    return f". Did you mean {found[0].replace(',', '.')}?" if found and found[0].replace(",", ".") != wrong else ""


class _Parser(argparse.ArgumentParser):
    """``ArgumentParser`` whose errors about mistyped numbers suggest a number."""

    def error(self, message: str) -> NoReturn:
        wrong = re.search(r"invalid \w+ value: '(.*)'$", message)
        super().error(f"{message}{number_hint(wrong[1]) if wrong else ''}")


def command_parser(prog: str, description: str | None, epilog: str | None = None) -> argparse.ArgumentParser:
    """Return an ``ArgumentParser`` with :class:`TextHelp` that accepts no abbreviated options."""
    return _Parser(prog, description=description, epilog=epilog, formatter_class=TextHelp, allow_abbrev=False)


class Waiting:
    """Line on a terminal that shows what the command is doing, until something else is printed. It also shows the
    seconds that have passed, and a progress bar while :mod:`flsv.utilities.progress` counts something.

    Args:
        what: the text of the line.
    """

    def __init__(self, what: str) -> None:
        self._what, self._count = what, ""
        self._over, self._since = threading.Event(), time.monotonic()
        self._draw()
        self._thread = threading.Thread(target=self._keep_drawing, daemon=True)
        self._thread.start()

    def _keep_drawing(self) -> None:
        while not self._over.wait(1.0):
            self._draw()

    def _draw(self) -> None:
        text = f"{self._what}{self._count}"
        if (seconds := int(time.monotonic() - self._since)) > 0:
            text += f" ({seconds} s)"
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)

    def now(self, what: str) -> None:
        """Replace the text of the line, and count its seconds from 0 again."""
        self._what, self._since = what, time.monotonic()
        self._draw()

    def show(self, what: str, done: int, total: int) -> None:
        """Show a progress bar: ``done`` of ``total`` pieces of ``what``. :mod:`flsv.utilities.progress` calls this."""
        full = round(BAR * done / max(total, 1))
        self._count = f" [{'=' * full}{' ' * (BAR - full)}] {done}/{total} {what}"

    def hide(self) -> None:
        """Remove the progress bar."""
        self._count = ""

    def end(self) -> None:
        """Erase the line from the terminal, and stop drawing it."""
        self._over.set()
        self._thread.join()
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)


#: Characters of a bar.
BAR = 20
_waiting: list[Waiting] = []
_printed: set[str] = set()


def waiting(what: str, quiet: bool = False, first: bool = False) -> None:
    """Show on stderr what the command is doing: on a terminal as a line, until :func:`done_waiting` or until a
    :func:`printer` prints something; without a terminal as a text that is printed once.

    Args:
        what: the text.
        quiet: whether to show nothing.
        first: whether a new command begins, so that texts of earlier commands may be printed again.
    """
    if first:
        _printed.clear()
    if quiet:
        return
    if not sys.stderr.isatty():
        if what not in _printed:
            print(what, file=sys.stderr, flush=True)
        _printed.add(what)
    elif _waiting:
        _waiting[0].now(what)
    else:
        _waiting.append(Waiting(what))
        progress.attach(_waiting[0])


def done_waiting() -> None:
    """Remove the line of :func:`waiting`, if there is one."""
    while _waiting:
        line = _waiting.pop()
        progress.detach(line)
        line.end()


def printer(quiet: bool) -> Callable[[str], None]:
    """Return a function that removes the line of :func:`waiting` and prints a text; if ``quiet``, it does nothing."""

    def say(text: str) -> None:
        done_waiting()
        print(text, flush=True)

    return (lambda text: None) if quiet else say
