"""The sink Terminal: the round, the client being trained and the coalitions being evaluated, on Lightning's own
progress bar; and the table at the end."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import RichProgressBar, TQDMProgressBar

from flsv import counting
from flsv.report.folder import where_results_are
from flsv.report.terminal import print_contributions
from flsv.round.result import RunResult, Sink

#: Seconds that a piece of work takes before it is shown, and between two changes of what is shown.
PATIENCE = 0.5
PAUSE = 0.1


class Terminal(Sink):
    """Adds ``round`` and ``client`` to what the trainer's progress bar shows, whichever bar it is, and while coalitions
    are evaluated their number (on Rich's and TQDM's). Prints the clients' table after the bar has left.

    Installed for the length of one fit; ``text`` is what the bar shows.

    Args:
        trainer: with its progress bar, if any.
        client_names: of the clients.
        table: whether the table is printed.
        files: whether there are files of the run to be named below it.
    """

    def __init__(self, trainer: L.Trainer, client_names: Sequence[str], table: bool, files: bool) -> None:
        self.text: dict[str, str] = {}
        self._trainer, self._bar = trainer, trainer.progress_bar_callback
        self._client_names, self._table, self._files = client_names, table, files
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

    def show_table(self, result: RunResult) -> None:
        """Print the table now, if it is wanted."""
        if self._table:
            where = where_results_are(self._trainer) if self._files else []
            print_contributions(result, self._client_names, where)

    def finish(self, result: RunResult) -> None:
        """Print the table after the progress bar has left the terminal: a live bar erases what is printed under it."""
        if not self._table:
            return
        show, bar = partial(self.show_table, result), self._bar
        if bar is None:
            show()
            return
        stop = bar.teardown

        def teardown(*hook: Any, **named: Any) -> None:
            self._put_teardown_back()
            stop(*hook, **named)
            show()

        bar.teardown = teardown  # type: ignore[method-assign]

    def close(self, failed: bool = False) -> None:
        """Give the bar its own text back; after an error nothing is printed."""
        counting.detach(self)
        if self._bar is not None:
            self._bar.__dict__.pop("get_metrics", None)
        if failed:
            self._put_teardown_back()

    def _put_teardown_back(self) -> None:
        if self._bar is not None:
            self._bar.__dict__.pop("teardown", None)

    def _draw(self) -> None:
        bar, module = self._bar, self._trainer.lightning_module
        if isinstance(bar, TQDMProgressBar) and bar._train_progress_bar is not None:
            bar.train_progress_bar.set_postfix(bar.get_metrics(self._trainer, module))
        elif isinstance(bar, RichProgressBar) and bar.progress is not None:
            bar._update_metrics(self._trainer, module)
            bar.refresh()
