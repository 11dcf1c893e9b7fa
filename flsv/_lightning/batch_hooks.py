"""BatchHooks, by which a Trainer's batch hooks drive the clients' turns, with each client's own batch numbers.

An epoch is the whole cohort to Lightning, and all its counts are of the epoch.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Checkpoint, LambdaCallback, ProgressBar
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor

from flsv._lightning.patches import PatchedAttributes, callbacks_of


class BatchHooks:
    """All batch hooks of a fit, between a client's coming and its leaving; installed for the length of the fit.

    A client comes before anybody's ``on_train_batch_start``, so that a learning rate that is set there is its own, and
    leaves after everybody's ``on_train_batch_end``, with what these have done to its model (a target network follows).
    Whoever counts batches (a step after every fourth, the generator in every fifth) counts those of the client.
    Lightning's progress bars count the cohort, and checkpoints come last.

    Args:
        trainer: with its module and callbacks.
        batch_idx: gives the place of the current batch among the client's, once it has come.
        begin: is called with a batch: the client comes, if it is its first.
        end: is called with what the step gave and the batch: the client leaves, if it was its last.
        idle: whether the Trainer's batches are nobody's: the module's own hooks then stay as they are.
    """

    def __init__(
        self,
        trainer: L.Trainer,
        batch_idx: Callable[[], int],
        begin: Callable[[Any], None],
        end: Callable[[Any, Any], None],
        idle: bool = False,
    ) -> None:
        self._trainer, self._batch_idx, self._end = trainer, batch_idx, end
        self._module_end: Callable[[Any, Any, int], Any] | None = None
        listed = list(callbacks_of(trainer))
        saving = [each for each in listed if isinstance(each, Checkpoint)]
        others = [each for each in listed if each not in saving]
        self._own = (
            LambdaCallback(on_train_batch_start=lambda trainer, module, batch, index: begin(batch)),
            LambdaCallback(
                on_train_batch_end=lambda trainer, module, outputs, batch, index: self._left(outputs, batch)
            ),
        )
        changes: list[tuple[Any, str, Any]] = [] if idle else self._of_module()
        changes += [
            (each, name, partial(self._counted, getattr(each, name)))
            for each in others
            for name in ("on_train_batch_start", "on_train_batch_end")
            if not isinstance(each, ProgressBar)
        ]
        # mypy: set by Lightning's connectors
        trainer.callbacks = [self._own[0], *others, self._own[1], *saving]  # type: ignore[attr-defined]
        self._patches = PatchedAttributes(changes)

    def remove(self) -> None:
        """Give module and callbacks their own hooks back."""
        self._patches.restore()
        trainer: Any = self._trainer
        trainer.callbacks = [each for each in trainer.callbacks if each not in self._own]

    def _of_module(self) -> list[tuple[Any, str, Any]]:
        module, loop = self._trainer.lightning_module, self._trainer.fit_loop.epoch_loop
        takes_index = is_param_in_hook_signature(module.training_step, "batch_idx", min_args=2)

        def step_arguments(kwargs: dict[str, Any], batch: Any, _: int) -> dict[str, Any]:
            kwargs["batch"] = batch
            if takes_index:
                kwargs["batch_idx"] = self._batch_idx()
            return kwargs

        # There is no public place to say which number training_step gets.
        changes: list[tuple[Any, str, Any]] = [(loop, "_build_kwargs", step_arguments)]
        for name in ("on_train_batch_start", "optimizer_step"):
            if is_overridden(name, module, L.LightningModule):
                changes.append((module, name, partial(self._numbered, getattr(module, name))))
        if is_overridden("on_train_batch_end", module, L.LightningModule):
            self._module_end = module.on_train_batch_end
            # Lightning calls it after the callbacks', and so after the client has left.
            changes.append((module, "on_train_batch_end", lambda *_: None))
        return changes

    def _left(self, outputs: Any, batch: Any) -> None:
        if self._module_end is not None:
            self._module_end(outputs, batch, self._batch_idx())
        self._end(outputs, batch)

    def _numbered(self, hook: Callable[..., Any], first: Any, _: int, *rest: Any) -> Any:
        return hook(first, self._batch_idx(), *rest)

    def _counted(self, hook: Callable[..., Any], *arguments: Any) -> Any:
        return hook(*arguments[:-1], self._batch_idx())


def step_loss(trainer: L.Trainer, outputs: Any) -> Tensor | None:
    """Return the loss that ``training_step`` gave, of a whole batch; None where it gave none."""
    loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
    if not isinstance(loss, Tensor):
        return None
    if trainer.lightning_module.automatic_optimization and trainer.accumulate_grad_batches != 1:
        return loss * trainer.accumulate_grad_batches  # Lightning has divided it by that
    return loss
