"""FederatedFitLoop: Lightning's fit loop, in which an epoch is a round.

Lightning may save at any batch: every n steps, on an exception, on Ctrl-C. The module then holds one client's
half-trained weights, from which no run can be resumed. Therefore a checkpoint saved within a round gets the global
model, Lightning's progress and the states of callbacks, optimizers and schedulers as they were at the round's start,
before any ``on_train_epoch_start``. The resumed round calls these hooks again. A checkpoint saved after aggregation,
but before Lightning has closed the epoch (at the end of validation, for example), gets the progress at the epoch's end.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Checkpoint, LambdaCallback, ProgressBar, Timer
from lightning.pytorch.loops import _FitLoop
from torch import Tensor

from flsv._lightning.patches import PatchedAttributes
from flsv.utilities.errors import ConfigurationError


class FederatedFitLoop(_FitLoop):
    """Lightning's fit loop, in which an epoch is a round. Lightning's own epoch runs once for each client and local
    epoch.

    Attributes:
        before_round: called before any hook of the next round.
        round: trains the clients, each by :meth:`train_epoch`, and makes the next global model.
        after_round: called when all hooks of the round have run.
        after_fit: called when all hooks of the fit's end have run.
        begun: whether the hooks of the round's start have run, which are not called again for a checkpoint's epoch.
        within: whether a round is unfinished.
    """

    before_round: Callable[[], Any] = staticmethod(lambda: None)
    round: Callable[[], Any]
    after_round: Callable[[], Any] = staticmethod(lambda: None)
    after_fit: Callable[[], Any] = staticmethod(lambda: None)
    begun = within = False
    _last, _idle, _first = True, False, 0

    def __init__(self, trainer: L.Trainer) -> None:
        vars(self).update(
            vars(trainer.fit_loop)
        )  # Lightning's own state, in the place of a new one
        self._waiting: list[Callable[[], Any]] = []
        self._undo = [PatchedAttributes([(trainer, "fit_loop", self)])]

    def begin(self, begin: Callable[[Any], Any], end: Callable[[Tensor | None], Any]) -> None:
        """Begin the fit. Call ``begin(batch)`` before and ``end(loss)`` after each batch of a client."""
        trainer, epoch = self.trainer, self.epoch_loop  # type: Any, Any
        self.remember()
        own = LambdaCallback(
            on_train_batch_start=lambda trainer, module, batch, index: begin(batch),
            on_train_batch_end=lambda trainer, module, outputs, batch, index: end(
                step_loss(trainer, outputs)
            ),
            on_train_epoch_end=lambda trainer, module: self.remember(),
        )
        changes: list[tuple[Any, str, Any]] = [
            (trainer, "callbacks", [own, *trainer.callbacks]),
            (epoch, "on_advance_end", partial(self._end_batch, epoch.on_advance_end)),
            (epoch, "update_lr_schedulers", partial(self._step, epoch.update_lr_schedulers)),
        ]
        for each in trainer.callbacks:
            if isinstance(each, Checkpoint):
                changes.append(
                    (each, "on_train_batch_end", partial(self._save, each.on_train_batch_end))
                )
            if isinstance(each, ProgressBar):
                for name in ("on_train_batch_start", "on_train_batch_end"):
                    changes.append((each, name, partial(self._show, getattr(each, name))))
        self._undo.append(PatchedAttributes(changes))

    def give_back(self) -> None:
        """Give the Trainer its own loop back, with the progress of this one."""
        while self._undo:
            self._undo.pop().restore()
        lightnings = vars(self.trainer.fit_loop)
        lightnings.update({name: vars(self)[name] for name in lightnings})

    # ---- a round, in the place of an epoch

    def on_advance_start(self) -> None:
        progress: Any = self.epoch_progress.total
        self.begun, started = False, progress.started
        self.before_round()
        self.within = True
        super().on_advance_start()
        self.begun = progress.started > started

    def advance(self) -> None:
        self._waiting, self._first = [], self.total_batch_idx + 1
        if self.begun:
            self.round()
        else:  # Lightning only ends the epoch of a checkpoint
            self.within = False
            super().advance()

    def on_advance_end(self) -> None:
        super().on_advance_end()
        self.after_round()

    def on_run_end(self) -> None:
        super().on_run_end()
        self.after_fit()

    def train_epoch(self, last: bool = True, idle: bool = False) -> None:
        """Train on all batches that the train dataloader yields now. ``last``: it is the round's last epoch. ``idle``:
        they are :class:`IdleBatch` only."""
        self._last, self._idle = last, idle
        # What `setup_data` reads of a loader that is another one, in a tenth of the time that two batches take.
        trainer, fetcher = self.trainer, self._data_fetcher  # type: Any, Any
        trainer.val_check_batch = self.max_batches = len(trainer.train_dataloader)
        iter(fetcher)
        try:
            super().advance()
        finally:
            self._last = True

    def end_round(self) -> None:
        """Call the hooks that were delayed until the module holds the next global model."""
        waiting, self._waiting, self._idle = self._waiting, [], True
        for each in waiting:
            each()

    # ---- checkpoints, which hold what lies between two rounds

    def remember(self) -> None:
        """Store Lightning's progress when a round is complete."""
        if not self.within:
            self._between = deepcopy(super().state_dict())
            self._counts = {
                "epoch": self.trainer.current_epoch,
                "global_step": self.trainer.global_step,
            }

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return Lightning's progress between rounds. It may be ahead of the hooks that have run."""
        if self.within:
            return deepcopy(self._between)
        loop = deepcopy(super().state_dict(*args, **kwargs))
        for part in ("total", "current"):
            epochs, batches = loop["epoch_progress"][part], loop["epoch_loop.batch_progress"][part]
            epochs["started"] = epochs["processed"] = epochs["ready"]
            batches["started"] = batches["processed"] = batches["completed"] = batches["ready"]
        return loop

    def copy_states(self, own: L.Callback) -> None:
        """Store the states of optimizers, schedulers and callbacks, except ``own``, before a round's hooks."""
        trainer: Any = self.trainer
        # What is written to files, and the time that has passed, is not undone with the round.
        rewound = [
            each
            for each in trainer.callbacks
            if each is not own and not isinstance(each, Checkpoint | Timer)
        ]
        self._callbacks = {
            each.state_key: _copied(each.state_dict(), type(each).__name__) for each in rewound
        }
        # Between two rounds an optimizer has no state: clients keep theirs in the store.
        optimizers = [{**each.state_dict(), "state": {}} for each in trainer.optimizers]
        schedulers = [each.scheduler.state_dict() for each in trainer.lr_scheduler_configs]
        others = {"optimizer_states": optimizers, "lr_schedulers": schedulers}
        if scale := trainer.precision_plugin.state_dict():
            others[type(trainer.precision_plugin).__qualname__] = scale
        used = [*trainer.optimizers, *(each.scheduler for each in trainer.lr_scheduler_configs)]
        self._others = _copied(
            others, " or ".join(dict.fromkeys(type(each).__name__ for each in used))
        )

    def rewind(self, checkpoint: dict[str, Any]) -> None:
        """Set a checkpoint saved within a round to the state at the round's start."""
        checkpoint.update(self._counts)
        if "callbacks" in checkpoint:  # else it holds weights only
            checkpoint["callbacks"].update(deepcopy(self._callbacks))
            checkpoint.update(deepcopy(self._others))

    # ---- what Lightning does once a round

    def _end_batch(self, end: Callable[..., None], fetcher: Any) -> None:
        trainer = self.trainer
        if not self.epoch_loop.batch_progress.is_last_batch or (
            trainer.should_stop and not self._last
        ):
            end(fetcher)
        elif self._last:
            # Lightning steps these after the validation, for which they must not wait: they are the client's own.
            self.epoch_loop.update_lr_schedulers("step", update_plateau_schedulers=True)
            self._waiting.append(partial(end, fetcher))
        else:
            trainer.limit_val_batches, limit = 0, trainer.limit_val_batches
            try:
                end(fetcher)
            finally:
                trainer.limit_val_batches = limit

    def _save(self, save: Callable[..., None], *hook: Any) -> None:
        if self._last and self.epoch_loop.batch_progress.is_last_batch:
            self._waiting.append(partial(save, *hook))
        else:
            save(*hook)

    def _step(
        self, step: Callable[..., None], interval: str, update_plateau_schedulers: bool
    ) -> None:
        if self._last if interval == "epoch" else not self._idle:
            step(interval, update_plateau_schedulers=update_plateau_schedulers)

    def _show(self, hook: Callable[..., None], *arguments: Any) -> None:
        hook(*arguments[:-1], self.total_batch_idx - self._first)


def _copied(state: Any, owner: str) -> Any:
    try:
        return deepcopy(state)
    except Exception as error:  # RecursionError, and whatever an object's own __deepcopy__ raises
        raise ConfigurationError(
            f"the state_dict of {owner} cannot be copied ({type(error).__name__}), and a checkpoint saved within a "
            "round has to hold the one of the round's start. Let it return plain values and tensors: no modules, "
            "functions or open files."
        ) from error


def step_loss(trainer: L.Trainer, outputs: Any) -> Tensor | None:
    """Return the loss as ``training_step`` returned it, or None."""
    loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
    if not isinstance(loss, Tensor):
        return None
    if trainer.lightning_module.automatic_optimization and trainer.accumulate_grad_batches != 1:
        return loss * trainer.accumulate_grad_batches  # Lightning has divided the loss
    return loss
