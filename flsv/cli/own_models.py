"""Trains and keeps the clients' final models of an algorithm, and evaluates them."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import lightning as L
import torch
from pandas import DataFrame
from torch import Tensor

from flsv._lightning.evaluation import on_device
from flsv.clients.client_manager import try_forward
from flsv.csv_files import Cell, number, number_or_nan, whole
from flsv.data import FederatedDataModule
from flsv.errors import ConfigurationError
from flsv.functional import collaborative_fairness
from flsv.games import ModelEvaluator
from flsv.loop import FederatedLoop
from flsv.models.imbalance import OWN_SCORES, ClassScores
from flsv.participants import LocalData

MEASURES = OWN_SCORES
#: Of what is kept of a run.
COLUMNS: Mapping[str, Cell] = {
    **{"models": str, "client": str},
    **dict.fromkeys(MEASURES, number_or_nan),
    **{"seconds": number, "evaluations": whole},
}
Tests = Literal["shared", "own"]
Models = Literal["received", "trained", "global"]


class OwnModels(L.Callback):
    """Evaluates every client's own model, and the global one, after the last round.

    A client has two: the one it has ``trained`` in its last round, and the one it then ``received`` from the server,
    the start point of the next (the global model where there is no personalization). What an attacker trained is what
    it kept.

    Args:
        loop: of the same trainer, with ``ClientEvaluation(keep_trained=True)``.
        tests: on what: the ``"shared"`` test set that no client has, or each client's ``"own"`` test split.

    Attributes:
        scores: after the fit, ``"received"`` and ``"trained"`` to measure to ``[n]``, and ``"global"`` to measure to
            ``[1]``, with own tests the mean over the clients; measures are :data:`flsv.models.imbalance.OWN_SCORES`.
        seconds: that the evaluation took.

    Raises:
        ConfigurationError: before training, ``tests="own"`` and a client without test samples; a module whose
            ``forward`` gives no logits ``[B, M]``.
    """

    def __init__(self, loop: FederatedLoop, tests: Tests = "shared") -> None:
        self.loop, self.tests = loop, tests
        self.scores: dict[str, dict[str, Tensor]] = {}
        self.seconds = 0.0
        if not loop.evaluation.keeps:
            raise ConfigurationError("OwnModels needs FederatedLoop(evaluation=ClientEvaluation(keep_trained=True)).")

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        data: FederatedDataModule = trainer.datamodule  # type: ignore[attr-defined]
        empty = [client for client in range(data.num_clients) if not len(data.client_indices(client, "test"))]
        if self.tests == "own" and empty:
            raise ConfigurationError(
                f'tests="own" needs a test split at every client; clients {empty} have none. Set '
                "FederatedDataModule(splits=Splits(client_test=0.2)), or a larger one."
            )

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        data: FederatedDataModule = trainer.datamodule  # type: ignore[attr-defined]
        try_forward(trainer, self._batches(data), data.num_classes, f'tests="{self.tests}"')

    def _batches(self, data: FederatedDataModule) -> Iterable[Any]:
        """All of the shared test set, or client 0's test split."""
        return data.test_dataloader() if self.tests == "shared" else data.client_loader(0, "test", shuffle=False)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        start = time.perf_counter()
        data: FederatedDataModule = trainer.datamodule  # type: ignore[attr-defined]
        server, received = self.loop.space.read(pl_module), self.loop.received()
        trained = {**received, **self.loop.trained}
        models: Mapping[str, Mapping[int, Tensor]] = {"received": received, "trained": trained, "global": {}}
        evaluate = ModelEvaluator(
            pl_module,
            self.loop.space,
            on_device(trainer, self._batches(data)),
            num_classes=data.num_classes,
            metric=_AUROC(data.num_classes),
            context=trainer.strategy.precision_plugin.forward_context,
        )
        everybody, private = list(range(data.num_clients)), bool(self.loop.space.private_names)
        found: list[Tensor] = []
        # One at a time where clients have samples of their own, or a part of the model that no vector holds.
        alone = private or self.tests == "own"
        for clients in [[client] for client in everybody] if alone else [everybody]:
            if self.tests == "own":
                evaluate = evaluate.on(on_device(trainer, data.client_loader(clients[0], "test")))
            rows = torch.stack([own.get(client, server) for own in models.values() for client in clients])
            # Whoever has no model of its own has the global one: that is evaluated once.
            distinct, places = rows.unique(dim=0, return_inverse=True)
            values = _values(evaluate, distinct)[places].view(len(models), len(clients), -1)
            if private:
                kept = self.loop.clients[clients[0]].ask(kept_private)
                values[:2] = _values(evaluate.on(None, partial(dict, kept)), distinct)[places].view_as(values)[:2]
            found.append(values)
        for name, columns in zip(models, torch.cat(found, dim=1).mT):
            self.scores[name] = dict(zip(MEASURES, columns.mean(1, keepdim=True) if name == "global" else columns))
        self.seconds = time.perf_counter() - start


class _AUROC(ClassScores):
    """The last of the three alone."""

    def compute(self) -> Tensor:  # type: ignore[override]
        return super().compute()["auroc"]


def kept_private(local: LocalData) -> dict[str, Tensor]:
    """Asked of a client: what it has of the model beside the vector, for a simulation's tests."""
    return dict(local.private)


def _values(evaluate: ModelEvaluator, models: Tensor) -> Tensor:
    """``[K, 3]``, the measures of the models."""
    scores = evaluate(models)
    return torch.stack([scores.value("metric" if name == "auroc" else name) for name in MEASURES], dim=1)


@dataclass(frozen=True)
class Outcome:
    """The result of one algorithm.

    Args:
        name: of the algorithm.
        table: a row per kind of model (as :attr:`OwnModels.scores`) and client, by :data:`COLUMNS`; the global model is
            nobody's. ``seconds`` are of the whole fit, without the evaluation of the models, ``evaluations`` the
            coalitions that were evaluated for the algorithm's metrics; one that two of them asked for is one.
        tests: what the models were tested on, see :class:`OwnModels`.
        names: of the clients.
    """

    name: str
    table: DataFrame
    tests: Tests = "shared"
    names: tuple[str, ...] = ()

    def scores(self, measure: str, models: Models = "received") -> Tensor:
        """``[n]``, of the global model ``[1]``."""
        return torch.tensor(self.table.loc[self.table["models"] == models, measure].tolist(), dtype=torch.float64)

    def gains(self, alone: Outcome, measure: str) -> Tensor:
        """``[n]``: the score of what each client received last, minus what it has alone."""
        return self.scores(measure) - alone.scores(measure)

    def fairness(self, alone: Outcome, measure: str) -> float:
        """Collaborative fairness; NaN where all clients end up with equally good models."""
        return float(collaborative_fairness(alone.scores(measure), self.scores(measure)))
