"""BatchHooks, which lets a Trainer's batch hooks drive the training of one client after the other.

To Lightning an epoch is the whole cohort, so its batch numbers count the epoch's batches; hooks get the client's
instead.
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
    """All batch hooks of a fit, called in the right order around each client's batches; installed for the length of the
    fit.

    At its first batch a client's model and optimizer are put in place before any ``on_train_batch_start`` runs, so that
    a learning rate set in that hook is the client's own. After its last batch the client's state is taken out again,
    after every ``on_train_batch_end``, so that changes made there (a target network that follows the model) are part of
    the client's model. Hooks that depend on the batch number (a step after every fourth batch, say) get the number
    among the client's batches. Lightning's progress bars count the batches of the cohort, and checkpoint callbacks run
    last.

    Args:
        trainer: the fit's trainer, with its module and callbacks attached.
        batch_idx: returns the current batch's number among the client's batches.
        begin: called with each batch before it is trained on; puts the client in place if this is its first batch.
        end: called with the training step's output and the batch; takes the client's state out if this was its last
            batch.
    """

    def __init__(
        self,
        trainer: L.Trainer,
        batch_idx: Callable[[], int],
        begin: Callable[[Any], None],
        end: Callable[[Any, Any], None],
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
        changes = self._of_module()
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
        """Restore the original hooks of the module and the callbacks."""
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

        # Lightning has no public way to set the batch number that training_step gets.
        changes: list[tuple[Any, str, Any]] = [(loop, "_build_kwargs", step_arguments)]
        for name in ("on_train_batch_start", "optimizer_step"):
            if is_overridden(name, module, L.LightningModule):
                changes.append((module, name, partial(self._numbered, getattr(module, name))))
        if is_overridden("on_train_batch_end", module, L.LightningModule):
            self._module_end = module.on_train_batch_end
            # Lightning calls this hook after the callbacks', when the client's state has been taken out already.
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
    """Return the loss that ``training_step`` returned, before division by accumulated batches; None if there is no
    loss."""
    loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
    if not isinstance(loss, Tensor):
        return None
    if trainer.lightning_module.automatic_optimization and trainer.accumulate_grad_batches != 1:
        return loss * trainer.accumulate_grad_batches  # Lightning has divided the loss
    return loss
