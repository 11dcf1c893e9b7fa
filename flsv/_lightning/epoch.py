"""LocalEpochs: Lightning's own epoch as a function, called once for each local epoch of each client of a round."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Checkpoint, LambdaCallback, ProgressBar
from torch import Tensor

from flsv._lightning.patches import PatchedAttributes, callbacks_of


class LocalEpochs:
    """Training of one client at a time: each call of :meth:`run` is one local epoch of one client."""

    def __init__(self, trainer: L.Trainer, begin: Callable[[Any], Any], end: Callable[[Tensor | None], Any]) -> None:
        loop = trainer.fit_loop
        self._trainer: Any = trainer  # Any: Lightning does not declare all attributes
        self._advance = loop.advance
        self._waiting: list[Callable[[], Any]] = []
        self._last, self._idle, self._first = True, False, 0
        own = LambdaCallback(
            on_train_batch_start=lambda trainer, module, batch, index: begin(batch),
            on_train_batch_end=lambda trainer, module, outputs, batch, index: end(step_loss(trainer, outputs)),
        )
        changes: list[tuple[Any, str, Any]] = [
            (trainer, "callbacks", [own, *callbacks_of(trainer)]),
            (loop.epoch_loop, "on_advance_end", partial(self._end_batch, loop.epoch_loop.on_advance_end)),
            (loop.epoch_loop, "update_lr_schedulers", partial(self._step, loop.epoch_loop.update_lr_schedulers)),
        ]
        for each in callbacks_of(trainer):
            if isinstance(each, Checkpoint):
                changes.append((each, "on_train_batch_end", partial(self._save, each.on_train_batch_end)))
            if isinstance(each, ProgressBar):
                for name in ("on_train_batch_start", "on_train_batch_end"):
                    changes.append((each, name, partial(self._show, getattr(each, name))))
        self._patches = PatchedAttributes(changes)

    def begin_round(self) -> None:
        """Count the round's batches from here on."""
        self._waiting = []
        self._first = self._trainer.fit_loop.total_batch_idx + 1

    def run(self, last: bool, idle: bool = False) -> None:
        """Train on all batches that the train dataloader yields now."""
        self._last, self._idle = last, idle
        trainer, loop = self._trainer, self._trainer.fit_loop
        # What `setup_data` reads of a loader that is another one, in a tenth of the time that two batches take.
        trainer.val_check_batch = loop.max_batches = len(trainer.train_dataloader)
        iter(loop._data_fetcher)
        try:
            self._advance()
        finally:
            self._last = True

    def finish(self) -> None:
        """Let Lightning do what has waited for the next global model, which the module must hold."""
        waiting, self._waiting, self._idle = self._waiting, [], True
        for each in waiting:
            each()

    def remove(self) -> None:
        """Restore Lightning's own methods."""
        self._patches.restore()

    def _end_batch(self, end: Callable[..., None], fetcher: Any) -> None:
        trainer = self._trainer
        if not trainer.fit_loop.epoch_loop.batch_progress.is_last_batch or (trainer.should_stop and not self._last):
            end(fetcher)
        elif self._last:
            # Lightning steps these after the validation, for which they must not wait: they are the client's own.
            trainer.fit_loop.epoch_loop.update_lr_schedulers("step", update_plateau_schedulers=True)
            self._waiting.append(partial(end, fetcher))
        else:
            trainer.limit_val_batches, limit = 0, trainer.limit_val_batches
            try:
                end(fetcher)
            finally:
                trainer.limit_val_batches = limit

    def _save(self, save: Callable[..., None], *hook: Any) -> None:
        if self._last and self._trainer.fit_loop.epoch_loop.batch_progress.is_last_batch:
            self._waiting.append(partial(save, *hook))
        else:
            save(*hook)

    def _step(self, step: Callable[..., None], interval: str, update_plateau_schedulers: bool) -> None:
        if self._last if interval == "epoch" else not self._idle:
            step(interval, update_plateau_schedulers=update_plateau_schedulers)

    def _show(self, hook: Callable[..., None], *arguments: Any) -> None:
        hook(*arguments[:-1], self._trainer.fit_loop.total_batch_idx - self._first)


def step_loss(trainer: L.Trainer, outputs: Any) -> Tensor | None:
    """Return the loss as ``training_step`` returned it, or None."""
    loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
    if not isinstance(loss, Tensor):
        return None
    if trainer.lightning_module.automatic_optimization and trainer.accumulate_grad_batches != 1:
        return loss * trainer.accumulate_grad_batches  # Lightning has divided the loss
    return loss
