"""AccumulationWindows: windows of gradient accumulation that begin and end with each client's batches."""

from __future__ import annotations

import lightning as L
from lightning.pytorch.callbacks import GradientAccumulationScheduler

from flsv._lightning.patches import PatchedAttributes, callbacks_of
from flsv.training.slots import Slot


class AccumulationWindows(Slot):
    """Windows of gradient accumulation that are counted by each client's batches.

    Lightning counts them over the whole epoch, which here is the whole cohort: a client's last gradients would be added
    to the next client's first. A client keeps nothing of its windows, since its first batch begins one and its
    last ends one.

    Args:
        trainer: the trainer whose counting is replaced, until :meth:`remove`.
    """

    name = "accumulation"

    def __init__(self, trainer: L.Trainer) -> None:
        self._trainer = trainer
        module = trainer.lightning_module
        self._complete = True
        self._active = module.automatic_optimization and (
            trainer.accumulate_grad_batches != 1
            or any(isinstance(callback, GradientAccumulationScheduler) for callback in callbacks_of(trainer))
        )
        self._patches = PatchedAttributes()
        if self._active:
            self._zero_grad = module.optimizer_zero_grad
            # Lightning asks the loop whether to step optimizer and schedulers, by no public method. It also zeroes the
            # gradients by the epoch's batch count; `begin_batch` does that instead.
            self._patches = PatchedAttributes(
                [
                    (trainer.fit_loop.epoch_loop, "_accumulated_batches_reached", lambda: self._complete),
                    (module, "optimizer_zero_grad", lambda *_: None),
                ]
            )

    def begin_batch(self, position: int, batches: int) -> None:
        if not self._active:
            return
        window = self._trainer.accumulate_grad_batches
        self._complete = (position + 1) % window == 0 or position + 1 == batches
        if position % window == 0:
            for optimizer in self._trainer.optimizers:
                self._zero_grad(self._trainer.current_epoch, position, optimizer)

    def remove(self) -> None:
        """Give Lightning its own counting back."""
        self._patches.restore()
        self._active = False
