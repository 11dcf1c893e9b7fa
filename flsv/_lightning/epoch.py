"""CohortEpoch: Lightning's epoch in two parts, between which the server makes the next global model."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Checkpoint

from flsv._lightning.patches import PatchedAttributes, callbacks_of


class CohortEpoch:
    """Lightning's epoch as a function that trains a cohort, and one that ends the epoch.

    What Lightning does after an epoch's last batch is put off until :meth:`finish`: checkpoints that are due at this
    step, the validation, and schedulers that follow a validated value. These are about the next global model, which the
    server makes in the meantime.

    Args:
        trainer: the fit's trainer, before ``fit_loop.advance`` is replaced.
        trained: returns whether the cohort's last batch has been trained on.
    """

    def __init__(self, trainer: L.Trainer, trained: Callable[[], bool]) -> None:
        self._advance, self._trained = trainer.fit_loop.advance, trained
        self._waiting: list[Callable[[], Any]] = []
        saving = [each for each in callbacks_of(trainer) if isinstance(each, Checkpoint)]
        put_off: list[tuple[Any, str]] = [(each, "on_train_batch_end") for each in saving]
        put_off.append((trainer.fit_loop.epoch_loop, "on_advance_end"))
        self._patches = PatchedAttributes(
            [(owner, name, partial(self._later, getattr(owner, name))) for owner, name in put_off]
        )

    def train(self) -> None:
        """Run the epoch up to its last batch, or until the fit is told to stop."""
        self._waiting = []
        self._advance()

    def finish(self) -> None:
        """Do what has been put off."""
        waiting, self._waiting = self._waiting, []
        for each in waiting:
            each()

    def remove(self) -> None:
        """Restore Lightning's own methods; a second call does nothing."""
        self._patches.restore()

    def _later(self, call: Callable[..., Any], *arguments: Any) -> None:
        if self._trained():
            self._waiting.append(partial(call, *arguments))
        else:
            call(*arguments)
