"""The models that the clients end up with, on one test set: what a federation is worth to each of them."""

from __future__ import annotations

import time

import lightning as L
import torch
from torch import Tensor

from flsv.coalition import ModelEvaluator
from flsv.data import FederatedDataModule
from flsv.evaluation import on_device
from flsv.loop import FederatedLoop

MEASURES = ("accuracy", "balanced_accuracy")


class OwnModels(L.Callback):
    """Evaluates every client's own model, and the global one, on the test set that no client has, after the last round.

    A client has two: the one it has ``trained`` in its last round, and the one it then ``received`` from the server,
    the start point of the next (the global model where there is no personalisation). What an attacker trained is what
    it sent.

    Args:
        loop: of the same trainer. It keeps the models that its clients train.

    Attributes:
        scores: after the fit, ``"received"`` and ``"trained"`` to measure to ``[n]``, and ``"global"`` to measure to
            ``[1]``; measures are ``"accuracy"`` and ``"balanced_accuracy"``.
        seconds: that the evaluation took.
    """

    def __init__(self, loop: FederatedLoop) -> None:
        self.loop = loop
        self.scores: dict[str, dict[str, Tensor]] = {}
        self.seconds = 0.0
        loop.keep_trained = True

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        start = time.perf_counter()
        data: FederatedDataModule = trainer.datamodule  # type: ignore[attr-defined]
        evaluate = ModelEvaluator(
            pl_module,
            self.loop.space,
            on_device(trainer, data.test_dataloader()),
            num_classes=data.num_classes,
            context=trainer.strategy.precision_plugin.forward_context,
        )
        server = self.loop.space.read(pl_module)
        distinct: list[Tensor] = []  # whoever has no model of its own has the global one: that is evaluated once
        places: dict[str, list[int]] = {}
        received = self.loop.received()
        trained = {**received, **self.loop.trained}
        for name, own in (("received", received), ("trained", trained), ("global", {0: server})):
            clients = 1 if name == "global" else data.num_clients
            places[name] = [_place(own.get(client, server), distinct) for client in range(clients)]
        scores = evaluate(torch.stack(distinct))
        for name, rows in places.items():
            self.scores[name] = {measure: scores.value(measure)[rows] for measure in MEASURES}
        self.seconds = time.perf_counter() - start


def _place(model: Tensor, distinct: list[Tensor]) -> int:
    """Where in ``distinct`` the model is; put there if it is not."""
    for place, other in enumerate(distinct):
        if torch.equal(model, other):
            return place
    distinct.append(model)
    return len(distinct) - 1
