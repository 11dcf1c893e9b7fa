"""AccumulationWindows: gradient accumulation that starts anew with every client."""

from __future__ import annotations

import lightning as L
from lightning.pytorch.callbacks import GradientAccumulationScheduler

from flsv._lightning.patches import PatchedAttributes, callbacks_of
from flsv.training.slots import Slot


class AccumulationWindows(Slot):
    """Gradient accumulation over each client's own batches.

    Lightning accumulates over the whole epoch, which in flsv is a whole cohort: one client's last gradients would be
    added to the next client's first gradients. Here a client's first batch begins an accumulation and its last batch
    ends one, so that no state is left to keep for the client.

    Args:
        trainer: the trainer whose own counting of batches is replaced until :meth:`remove` is called.
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
            # Lightning asks the fit loop, by a private method, whether to step the optimizer and the schedulers. It
            # also zeroes the gradients according to the batch's number in the epoch; `begin_batch` does that instead.
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
        """Restore Lightning's own counting of batches."""
        self._patches.restore()
        self._active = False
