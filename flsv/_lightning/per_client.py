"""Gives each client its own accumulation windows, batch numbers and loss scale, of which a Trainer has one.

An epoch is the whole cohort to Lightning, and all its counts are of the epoch.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Checkpoint, GradientAccumulationScheduler, LambdaCallback, ProgressBar
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor

from flsv._lightning.patches import PatchedAttributes


class AccumulationWindows:
    """Windows of gradient accumulation that begin and end with each client's batches.

    Lightning counts its windows over the whole epoch, which here is the whole cohort: a client's last gradients would
    be added to the next client's first. Installed on a trainer for the length of one fit.
    """

    def __init__(self, trainer: L.Trainer) -> None:
        self._trainer = trainer
        module = trainer.lightning_module
        self._complete = True
        self.active = module.automatic_optimization and (
            trainer.accumulate_grad_batches != 1
            or any(isinstance(callback, GradientAccumulationScheduler) for callback in trainer.callbacks)  # type: ignore[attr-defined]
        )
        self._patches = PatchedAttributes()
        if self.active:
            self._zero_grad = module.optimizer_zero_grad
            # Lightning asks the loop whether to step optimizer and schedulers; there is no public place to answer. It
            # empties the gradients by the epoch's batch count, so that is left to `begin_batch`.
            self._patches = PatchedAttributes(
                [
                    (trainer.fit_loop.epoch_loop, "_accumulated_batches_reached", lambda: self._complete),
                    (module, "optimizer_zero_grad", lambda *_: None),
                ]
            )

    def begin_batch(self, position: int, batches: int) -> None:
        """``position`` counts the client's batches from 0; it has ``batches`` in this round."""
        window = self._trainer.accumulate_grad_batches
        self._complete = (position + 1) % window == 0 or position + 1 == batches
        if position % window == 0:
            for optimizer in self._trainer.optimizers:
                self._zero_grad(self._trainer.current_epoch, position, optimizer)

    def remove(self) -> None:
        """Give Lightning its own counting back."""
        self._patches.give_back()
        self.active = False


class ClientHooks:
    """A module's own hooks, which belong to the client that trains; installed for the length of one fit.

    A module that counts its batches (a step after every fourth, the generator in every fifth) counts those of the
    client, and what it does when a batch has ended (a target network follows) it does to the client's model before that
    leaves. Callbacks: :class:`CallbackHooks`.

    Args:
        trainer: with its module.
        batch_idx: the place of the current batch among the client's.
    """

    def __init__(self, trainer: L.Trainer, batch_idx: Callable[[], int]) -> None:
        module = trainer.lightning_module
        self._batch_idx = batch_idx
        self._end: Callable[[Any, Any, int], Any] | None = None
        loop: Any = trainer.fit_loop.epoch_loop
        takes_index = is_param_in_hook_signature(module.training_step, "batch_idx", min_args=2)

        def step_arguments(kwargs: dict[str, Any], batch: Any, _: int) -> dict[str, Any]:
            kwargs["batch"] = batch
            if takes_index:
                kwargs["batch_idx"] = batch_idx()
            return kwargs

        # There is no public place to say which number training_step gets.
        changes: list[tuple[Any, str, Any]] = [(loop, "_build_kwargs", step_arguments)]
        for name in ("on_train_batch_start", "optimizer_step"):
            if is_overridden(name, module, L.LightningModule):
                changes.append((module, name, partial(self._count, getattr(module, name))))
        if is_overridden("on_train_batch_end", module, L.LightningModule):
            self._end = module.on_train_batch_end
            # Lightning calls it after the callbacks', and so after the client has left.
            changes.append((module, "on_train_batch_end", lambda *_: None))
        self._patches = PatchedAttributes(changes)

    def end_batch(self, outputs: Any, batch: Any) -> None:
        """The module's ``on_train_batch_end``."""
        if self._end is not None:
            self._end(outputs, batch, self._batch_idx())

    def remove(self) -> None:
        """Give the module its own hooks back."""
        self._patches.give_back()

    def _count(self, hook: Callable[..., Any], first: Any, _: int, *rest: Any) -> Any:
        return hook(first, self._batch_idx(), *rest)


def step_loss(trainer: L.Trainer, outputs: Any) -> Tensor | None:
    """The loss that ``training_step`` gave, of a whole batch; None where it gave none."""
    loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
    if not isinstance(loss, Tensor):
        return None
    if trainer.lightning_module.automatic_optimization and trainer.accumulate_grad_batches != 1:
        return loss * trainer.accumulate_grad_batches  # Lightning has divided it by that
    return loss


class CallbackHooks:
    """All callbacks' batch hooks between a client's coming and its leaving, in whatever order they are listed.

    A client comes before anybody's ``on_train_batch_start``, so that a learning rate set there is its own, and leaves
    after everybody's ``on_train_batch_end``, with what these have done to its model. The hooks get the place of the
    batch among the client's, as the module's do; Lightning's progress bars count the cohort, and checkpoints come last.
    Installed on a trainer for the length of one fit.

    Args:
        trainer: with its callbacks.
        batch_idx: the place of the current batch among the client's, once it has come.
        begin: of a batch: the client comes, if it is its first.
        end: of what the step gave and the batch: the client leaves, if it was its last.
    """

    def __init__(
        self,
        trainer: L.Trainer,
        batch_idx: Callable[[], int],
        begin: Callable[[Any], None],
        end: Callable[[Any, Any], None],
    ) -> None:
        self._trainer = trainer
        self._batch_idx = batch_idx
        listed = list(trainer.callbacks)  # type: ignore[attr-defined]
        saving = [each for each in listed if isinstance(each, Checkpoint)]
        others = [each for each in listed if each not in saving]
        self._own = (
            LambdaCallback(on_train_batch_start=lambda trainer, module, batch, index: begin(batch)),
            LambdaCallback(on_train_batch_end=lambda trainer, module, outputs, batch, index: end(outputs, batch)),
        )
        trainer.callbacks = [self._own[0], *others, self._own[1], *saving]  # type: ignore[attr-defined]
        self._patches = PatchedAttributes(
            [
                (each, name, partial(self._counted, getattr(each, name)))
                for each in others
                for name in ("on_train_batch_start", "on_train_batch_end")
                if not isinstance(each, ProgressBar)
            ]
        )

    def remove(self) -> None:
        """Give the callbacks their own hooks back."""
        self._patches.give_back()
        trainer: Any = self._trainer
        trainer.callbacks = [each for each in trainer.callbacks if each not in self._own]

    def _counted(self, hook: Callable[..., Any], *arguments: Any) -> Any:
        return hook(*arguments[:-1], self._batch_idx())


class LossScale:
    """The trainer's ``GradScaler``, where it has one, as each client's own.

    ``precision="16-mixed"`` on a GPU scales the loss so that small gradients do not vanish: torch's ``GradScaler``
    starts high, leaves out steps whose gradients overflow, and goes down until they do not. With one scale for all, the
    cohort's first client would leave out steps for the others.

    Args:
        trainer: with its precision plugin.
    """

    def __init__(self, trainer: L.Trainer) -> None:
        scaler = getattr(getattr(trainer, "precision_plugin", None), "scaler", None)
        self._scaler: Any = scaler if scaler is not None and scaler.is_enabled() else None
        self._fresh = self.read()

    def read(self) -> dict[str, Any] | None:
        """Its state now; None where there is no scaler."""
        return None if self._scaler is None else dict(self._scaler.state_dict())

    def load(self, state: dict[str, Any] | None) -> None:
        """A client's; None: as it was before the first."""
        if self._scaler is not None:
            self._scaler.load_state_dict(self._fresh if state is None else state)

    def state_dict(self) -> dict[str, Any] | None:
        return self._fresh

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        # Lightning has restored that of the last client of the run that was saved.
        self._fresh = self._fresh if state is None else state
