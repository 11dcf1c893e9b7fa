"""A progress bar of our own, where no trainer has one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from flsv import counting


class CountedBar:
    """Shows what is counted: what it is, how many of how many, the time so far and the time left."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._task: Any = None
        self._what = ""

    def show(self, what: str, done: int, total: int) -> None:
        if self._task is None or what != self._what:
            self.hide()
            self._what, self._task = what, self._progress.add_task(what.capitalize(), total=total)
        self._progress.update(self._task, completed=done, total=total)

    def hide(self) -> None:
        if self._task is not None:
            self._progress.remove_task(self._task)
            self._task = None


@contextmanager
def counted_bar(enabled: bool = True) -> Iterator[None]:
    """Show on the terminal (standard error) what is counted inside; nothing where there is no terminal.

    Args:
        enabled: False: show nothing.
    """
    console = Console(stderr=True)
    if not enabled or not console.is_terminal:
        yield
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(
        *columns, TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn(), console=console, transient=True
    ) as progress:
        listener = CountedBar(progress)
        counting.attach(listener)
        try:
            yield
        finally:
            counting.detach(listener)
