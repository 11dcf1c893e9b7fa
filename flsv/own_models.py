"""The models that the clients end up with, on one test set: what a federation is worth to each of them."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import lightning as L
import torch
from torch import Tensor

from flsv.coalition import ModelEvaluator
from flsv.data import FederatedDataModule
from flsv.evaluation import on_device
from flsv.loop import FederatedLoop
from flsv.personalization import Personalizer
from flsv.round import Round
from flsv.strategy import Contributions

MEASURES = ("accuracy", "balanced_accuracy")


class OwnModels(L.Callback):
    """Evaluates every client's own model, and the global one, on the test set that no client has, after the last round.

    A client has two: the one it has ``trained`` in its last round, and the one it then ``received`` from the server,
    the start point of the next (the global model where there is no personalisation). What an attacker trained is what
    it sent.

    Args:
        loop: of the same trainer. Its personaliser is watched.

    Attributes:
        scores: after the fit, ``"received"`` and ``"trained"`` to measure to ``[n]``, and ``"global"`` to measure to
            ``[1]``; measures are ``"accuracy"`` and ``"balanced_accuracy"``.
        seconds: that the evaluation took.
    """

    def __init__(self, loop: FederatedLoop) -> None:
        self.loop = loop
        self.scores: dict[str, dict[str, Tensor]] = {}
        self.seconds = 0.0
        self._watched = loop.personalizer = _Watched(loop.personalizer)

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
        for name, own in (("received", self.loop.models), ("trained", self._watched.trained), ("global", {0: server})):
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


class _Watched(Personalizer):
    """Another personaliser, or none; remembers the models that the clients trained."""

    def __init__(self, inner: Personalizer | None) -> None:
        self.inner, self.trained = inner, dict[int, Tensor]()
        self.metric = None if inner is None else inner.metric

    def personalize(
        self, round: Round, contributions: Contributions, models: Mapping[int, Tensor]
    ) -> Mapping[int, Tensor]:
        self.trained.update(zip(round.client_ids.tolist(), round.client_vectors.clone()))
        return {} if self.inner is None else self.inner.personalize(round, contributions, models)

    def state_dict(self) -> dict[str, Any]:
        return {"trained": self.trained, "inner": {} if self.inner is None else self.inner.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.trained = dict(state["trained"])
        if self.inner is not None:
            self.inner.load_state_dict(state["inner"])

    def __repr__(self) -> str:
        return repr(self.inner)
