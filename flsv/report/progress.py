"""The round, the client being trained and the coalitions being evaluated, on Lightning's own progress bar."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import RichProgressBar, TQDMProgressBar

from flsv import counting

#: Seconds that a piece of work takes before it is shown, and between two changes of what is shown.
PATIENCE = 0.5
PAUSE = 0.1


class ProgressText:
    """Adds ``round`` and ``client`` to what the trainer's progress bar shows, whichever bar it is, and while coalitions
    are evaluated their number (on Rich's and TQDM's).

    Installed for the length of one fit; ``text`` is what is shown.
    """

    def __init__(self, trainer: L.Trainer) -> None:
        self.text: dict[str, str] = {}
        self._trainer, self._bar = trainer, trainer.progress_bar_callback
        self._counts: dict[str, str] = {}
        self._since = self._drawn = 0.0
        if self._bar is None:
            return
        counting.attach(self)
        get_metrics = self._bar.get_metrics

        def with_text(trainer: L.Trainer, module: L.LightningModule) -> dict[str, Any]:
            shown = {k: v for k, v in get_metrics(trainer, module).items() if k != "v_num"}
            return {**(self.text if trainer.training else {}), **self._counts, **shown}

        self._bar.get_metrics = with_text  # type: ignore[method-assign, assignment]

    def show(self, what: str, done: int, total: int) -> None:
        """So many of so many, for :mod:`flsv.counting`."""
        now = time.monotonic()
        if not done:
            self._since = now
        if now - self._since >= PATIENCE and now - self._drawn >= PAUSE:
            self._drawn = now
            self._counts = {what: f"{done}/{total}"}
            self._draw()

    def hide(self) -> None:
        """The work is done, or given up."""
        if self._counts:
            self._counts = {}
            self._draw()

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
        counting.detach(self)
        if self._bar is not None:
            self._bar.__dict__.pop("get_metrics", None)

    def _draw(self) -> None:
        bar, module = self._bar, self._trainer.lightning_module
        if isinstance(bar, TQDMProgressBar) and bar._train_progress_bar is not None:
            bar.train_progress_bar.set_postfix(bar.get_metrics(self._trainer, module))
        elif isinstance(bar, RichProgressBar) and bar.progress is not None:
            bar._update_metrics(self._trainer, module)
            bar.refresh()
