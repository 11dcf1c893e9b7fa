"""A client's term of the objective, with the model that it refers to."""

from __future__ import annotations

from typing import Any

import lightning as L
from torch import Tensor

from flsv._clients import CohortTraining
from flsv.local import ClientTerm


class AnchoredTerm:
    """Adds a client term's gradients to those of the clients of a round, one after the other.

    Args:
        term: the term; None does nothing.
        training: the round's clients.
    """

    def __init__(self, term: ClientTerm | None, training: CohortTraining) -> None:
        self._term, self._training = term, training

    def begin_round(self) -> None:
        """The global model is known."""
        self._anchor(self._training.global_vector)

    def begin_client(self) -> None:
        """A client is about to train."""
        if self._term is not None and self._term.anchor == "start":
            self._anchor(self._training.start)

    def add_gradients(self, optimizer: Any) -> None:
        """Before a step of this optimizer."""
        if self._term is not None:
            held = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
            self._term.add_gradients(held, [p.grad for p in held], [self._anchors[p] for p in held])

    def _anchor(self, vector: Tensor) -> None:
        if self._term is not None:
            module: L.LightningModule = self._training.module
            anchors = self._training.space.unflatten(vector)
            self._anchors = {p: anchors[name].to(p.dtype) for name, p in module.named_parameters()}
