"""Gradient accumulation whose windows begin and end with each client's batches.

Lightning counts its windows over the whole epoch, which here is the whole cohort: a client's last gradients would be
added to the next client's first. While installed, the windows are counted from each client's first batch and end with
its last.
"""

from __future__ import annotations

from typing import Any

import lightning as L
from lightning.pytorch.callbacks import GradientAccumulationScheduler


class AccumulationWindows:
    """Installed on a trainer for the length of one fit."""

    def __init__(self, trainer: L.Trainer) -> None:
        self._trainer = trainer
        self._module = module = trainer.lightning_module
        self._complete = True
        self.active = module.automatic_optimization and (
            trainer.accumulate_grad_batches != 1
            or any(isinstance(callback, GradientAccumulationScheduler) for callback in trainer.callbacks)  # type: ignore[attr-defined]
        )
        if self.active:
            self._zero_grad = module.optimizer_zero_grad
            # Lightning asks this whether to step the optimizer and the schedulers; there is no public place to answer.
            trainer.fit_loop.epoch_loop._accumulated_batches_reached = lambda: self._complete  # type: ignore[method-assign]
            # It empties the gradients by the epoch's batch count, so that is left to `begin_batch`.
            module.optimizer_zero_grad = lambda *_: None  # type: ignore[method-assign, assignment]

    def begin_batch(self, position: int, batches: int) -> None:
        """``position`` counts the client's batches from 0; it has ``batches`` in this round."""
        window = self._trainer.accumulate_grad_batches
        self._complete = (position + 1) % window == 0 or position + 1 == batches
        if position % window == 0:
            for optimizer in self._trainer.optimizers:
                self._zero_grad(self._trainer.current_epoch, position, optimizer)

    def remove(self) -> None:
        """Give Lightning its own counting back."""
        if self.active:
            owners: list[tuple[Any, str]] = [
                (self._trainer.fit_loop.epoch_loop, "_accumulated_batches_reached"),
                (self._module, "optimizer_zero_grad"),
            ]
            for owner, name in owners:
                owner.__dict__.pop(name, None)
            self.active = False
