"""Progress: shows how far the work after a run is."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Self

import lightning as L
from lightning.pytorch.callbacks.progress.tqdm_progress import Tqdm
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor

from flsv.core.ranks import ranks_of
from flsv.functional.shapley.predicted_outputs import OutputMeasure, count_predictions
from flsv.values.coalition_files import Outputs
from flsv.values.query import Game

#: Seconds between two log lines on the progress.
PAUSE_SECONDS = 10.0
#: The number of models whose outputs are scored to see how long it takes.
NUM_TIMED = 4


class Progress:
    """Display of the progress of ``total`` steps: a bar in a terminal or notebook, or a log line every
    :data:`PAUSE_SECONDS`. The bar is shown from the first step on, or inside of a ``with`` statement.
    """

    _num_done = 0
    _bar: Tqdm | None = None

    def __init__(self, trainer: L.Trainer, total: int, title: str) -> None:
        has_bar = trainer.progress_bar_callback is not None and _can_redraw()
        self._shows_bar = has_bar and ranks_of(trainer).rank == 0
        self._total = total
        self._title = title
        self._line_time = time.monotonic()

    def __enter__(self) -> Self:
        self._bar = Tqdm(
            total=self._total,
            desc=self._title,
            leave=False,
            disable=not self._shows_bar,
        )
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def __call__(self, steps: int = 1) -> None:
        """Count steps that are done."""
        if self._bar is None:
            self.__enter__()
        assert self._bar is not None
        self._bar.update(steps)
        self._num_done += steps
        if self._num_done >= self._total:
            self._bar.close()
        is_due = time.monotonic() - self._line_time >= PAUSE_SECONDS
        if is_due and not self._shows_bar:
            self._line_time = time.monotonic()
            rank_zero_info(f"flsv: {self._title}: {self._num_done} of {self._total} are done.")

    def counting(self, score: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        """Return a function that scores outputs ``[c, V, ...]``, and counts them."""

        def counted(outputs: Tensor) -> Tensor:
            utilities = score(outputs)
            self(len(outputs))
            return utilities

        return counted


def _can_redraw() -> bool:
    """Return whether a bar can be drawn in place: in a terminal or a notebook, not in a file or a pipe."""
    is_interactive = hasattr(sys, "ps1")
    return is_interactive or sys.stderr.isatty()


def showing_progress(game: Game, trainer: L.Trainer) -> Game:
    """Return the game with a display of how many predicted outputs are scored, of all rounds and by sample."""
    measure = game.of_outputs
    if not isinstance(measure, OutputMeasure) or not game.predicts:
        return game
    num_predictions = count_predictions(game.masks, measure.logits)
    progress = Progress(trainer, num_predictions * len(game.rounds), "Values of clients")
    shown = replace(measure, utility=progress.counting(measure.utility))
    if measure.by_sample is not None:
        progress = Progress(trainer, num_predictions + len(game.masks), "Values by sample")
        shown = replace(shown, by_sample=progress.counting(measure.by_sample))
    return replace(game, of_outputs=shown)


def seconds_of_values(game: Game, outputs: Outputs) -> float:
    """Return about how long the values of a game take, by the time in which the ``outputs`` of one model are scored."""
    measure = game.of_outputs
    if not isinstance(measure, OutputMeasure) or not game.predicts:
        return 0.0
    model_outputs = outputs[game.outputs]
    shape = NUM_TIMED, *model_outputs.shape
    copies = model_outputs.expand(shape).contiguous()
    start_time = time.monotonic()
    measure.utility(copies)
    seconds = (time.monotonic() - start_time) / NUM_TIMED
    num_predictions = count_predictions(game.masks, measure.logits)
    # An output is predicted from those of all trained coalitions in about the time in which it is scored.
    return 2 * seconds * len(game.rounds) * num_predictions
