"""The round, the client being trained and the coalitions being evaluated, on Lightning's own progress bar."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import ProgressBar, RichProgressBar, TQDMProgressBar
from lightning.pytorch.callbacks.progress.tqdm_progress import Tqdm

from flsv import counting

#: Seconds that a piece of work takes before it is shown, and between two changes of what is shown.
PATIENCE = 0.5
PAUSE = 0.1


class ProgressText:
    """Adds ``round`` and ``client`` to what the trainer's progress bar shows, whichever bar it is, and a line with
    counts and the time left while coalitions are evaluated (on Rich's and TQDM's).

    Installed for the length of one fit; ``text`` is what is shown.
    """

    def __init__(self, trainer: L.Trainer) -> None:
        self.text: dict[str, str] = {}
        self._bar = trainer.progress_bar_callback
        self._counts = _line_for(self._bar)
        if self._counts is not None:
            counting.attach(self._counts)
        if self._bar is not None:
            get_metrics = self._bar.get_metrics

            def with_text(trainer: L.Trainer, module: L.LightningModule) -> dict[str, Any]:
                shown = {k: v for k, v in get_metrics(trainer, module).items() if k != "v_num"}
                return {**(self.text if trainer.training else {}), **shown}

            self._bar.get_metrics = with_text  # type: ignore[method-assign, assignment]

    def afterwards(self, act: Callable[[], None]) -> None:
        """Call a function after the progress bar has left the terminal, because a live bar erases what is printed under
        it."""
        bar = self._bar
        if bar is None:
            act()
            return
        stop = bar.teardown

        def teardown(trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
            self.cancel()
            stop(trainer, pl_module, stage)
            act()

        bar.teardown = teardown  # type: ignore[method-assign]

    def cancel(self) -> None:
        """Do it not, after an error."""
        if self._bar is not None:
            self._bar.__dict__.pop("teardown", None)

    def remove(self) -> None:
        """Give the bar its own text back."""
        if self._counts is not None:
            counting.detach(self._counts)
        if self._bar is not None:
            self._bar.__dict__.pop("get_metrics", None)


class CountLine:
    """A line for work that takes longer than a moment.

    Args:
        draw: draws so many of so many.
        clear: takes the line away.
    """

    def __init__(self, draw: Callable[[str, int, int], None], clear: Callable[[], None]) -> None:
        self._draw, self._clear = draw, clear
        self._what, self._since, self._last, self._shown = "", 0.0, 0.0, False

    def show(self, what: str, done: int, total: int) -> None:
        now = time.monotonic()
        if what != self._what or not done:
            self._what, self._since = what, now
        if now - self._since < PATIENCE and not self._shown:
            return
        if self._shown and now - self._last < PAUSE and done < total:
            return
        self._last, self._shown = now, True
        self._draw(what.capitalize(), done, total)

    def hide(self) -> None:
        if self._shown:
            self._clear()
        self._what, self._shown = "", False


def _line_for(bar: ProgressBar | None) -> CountLine | None:
    """A line below this bar; None where there is no bar, or one that nothing is known of."""
    if isinstance(bar, RichProgressBar) and bar.is_enabled:
        rich = _RichLine(bar)
        return CountLine(rich.draw, rich.clear)
    if isinstance(bar, TQDMProgressBar) and bar.is_enabled:
        tqdm = _TqdmLine(bar)
        return CountLine(tqdm.draw, tqdm.clear)
    return None


class _RichLine:
    """One task of the bar's own progress, shown when it is needed."""

    def __init__(self, bar: RichProgressBar) -> None:
        self._bar = bar
        self._progress: Any = None
        self._task: Any = None

    def draw(self, what: str, done: int, total: int) -> None:
        progress: Any = self._bar.progress
        if progress is None:
            return
        if progress is not self._progress:  # a bar that is left standing is followed by another
            self._progress, self._task = progress, progress.add_task(what, total=total, visible=True)
        elif not progress.tasks[self._place()].visible:
            progress.reset(self._task, total=total, description=what, visible=True)
        progress.update(self._task, completed=done, total=total)
        self._bar.refresh()

    def clear(self) -> None:
        if self._progress is not None:
            self._progress.update(self._task, visible=False)
            self._bar.refresh()

    def _place(self) -> int:
        return next(place for place, task in enumerate(self._progress.tasks) if task.id == self._task)


class _TqdmLine:
    """A bar of its own below the others."""

    def __init__(self, bar: TQDMProgressBar) -> None:
        self._bar = bar
        self._line: Any = None

    def draw(self, what: str, done: int, total: int) -> None:
        if self._line is None:
            self._line = Tqdm(
                desc=what,
                position=2 * self._bar.process_position + 2,
                disable=self._bar.is_disabled,
                leave=False,
                dynamic_ncols=True,
                file=sys.stdout,
            )
        self._line.total = total
        self._line.n = done
        self._line.refresh()

    def clear(self) -> None:
        if self._line is not None:
            self._line.close()
            self._line = None
