"""AddedLoss: terms that a client algorithm adds to the loss of one batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import lightning as L

from flsv._lightning.patches import PatchedAttributes
from flsv.training.algorithms import ClientContext
from flsv.training.training_step import training_loss


class AddedLoss:
    """Adds a context's loss terms to the result of ``training_step``, until :meth:`remove`.

    Lightning divides the sum by the number of accumulated batches, and scales it in half precision, as the loss alone.
    """

    def __init__(self, trainer: L.Trainer, context: ClientContext) -> None:
        strategy = trainer.strategy
        self._context = context
        self._training_step = strategy.training_step
        self._term_context = strategy.precision_plugin.train_step_context
        self._handles = [term.watch() for term in context.loss_terms]
        self._patch = PatchedAttributes([(strategy, "training_step", self._step)])

    def remove(self) -> None:
        """Restore ``training_step``, and forget the terms."""
        self._patch.restore()
        for handle in self._handles:
            handle.remove()
        self._context.loss_terms = []

    def _step(self, *args: Any, **kwargs: Any) -> Any:
        outputs = self._training_step(*args, **kwargs)
        terms = self._context.loss_terms
        if not terms or outputs is None:  # Lightning skips a batch without a loss
            return outputs

        loss = training_loss(outputs)
        with self._term_context():
            for term in terms:
                loss = loss + term.value()
        if isinstance(outputs, Mapping):
            return {**outputs, "loss": loss}
        return loss
