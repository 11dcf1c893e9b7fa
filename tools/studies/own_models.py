"""Test every client's own model, and the global one, after the last round of a fit."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, Literal

import lightning as L
import torch
from torch import Tensor

from flsv._lightning.evaluation import on_device
from flsv.core import LocalData
from flsv.data import FederatedDataModule
from flsv.engines.scoring import try_forward
from flsv.federation import FederatedLoop
from flsv.games import ModelEvaluator
from flsv.scores.class_scores import OWN_SCORES as MEASURES, ClassScores
from flsv.utilities.errors import ConfigurationError


class OwnModels(L.Callback):
    """Callback that evaluates every client's own model, and the global model, after the last round.

    A client has two own models: the one that it has ``trained`` in its last round, and the one that it then
    ``received`` from the server as the start point of the next round (the global model if there is no personalization).
    For an attacker, ``trained`` is the model that it kept, not the one that it sent.

    Args:
        loop: the federated loop of the same trainer, with ``ClientEvaluation(keep_trained=True)``.
        tests: the test samples: ``"shared"``, the test set that no client has, or ``"own"``, each client's test split.

    Attributes:
        scores: set after the fit, ``{models: {measure: scores}}`` with ``[n]`` scores for the ``"received"`` and
            ``"trained"`` models and one, ``[1]``, for the ``"global"`` model (with own tests the mean over the
            clients); the measures are :data:`flsv.scores.class_scores.OWN_SCORES`.

    Raises:
        ConfigurationError: the loop does not keep the trained models; or, before training: ``tests="own"`` and a client
            has no test samples, or the module's ``forward`` does not return logits ``[B, M]`` for B samples and M
            classes.
    """

    def __init__(self, loop: FederatedLoop, tests: Literal["shared", "own"] = "shared") -> None:
        self.loop, self.tests = loop, tests
        self.scores: dict[str, dict[str, Tensor]] = {}
        if not loop.evaluation.keeps:
            raise ConfigurationError(
                "OwnModels needs FederatedLoop(evaluation=ClientEvaluation(keep_trained=True))."
            )

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        data: FederatedDataModule = trainer.datamodule  # type: ignore[attr-defined]  # set by Lightning's connectors
        empty = [
            client
            for client in range(data.num_clients)
            if not len(data.client_indices(client, "test"))
        ]
        if self.tests == "own" and empty:
            raise ConfigurationError(
                f'tests="own" needs a test split at every client; clients {empty} have none. Set '
                "FederatedDataModule(splits=Splits(client_test=0.2)), or a larger one."
            )

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        data: FederatedDataModule = trainer.datamodule  # type: ignore[attr-defined]  # set by Lightning's connectors
        try_forward(trainer, self._batches(data), data.num_classes, f'tests="{self.tests}"')

    def _batches(self, data: FederatedDataModule) -> Iterable[Any]:
        """Return the batches of the shared test set, or of client 0's test split, on which evaluation is tried."""
        return (
            data.test_dataloader()
            if self.tests == "shared"
            else data.client_loader(0, "test", shuffle=False)
        )

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        data: FederatedDataModule = trainer.datamodule  # type: ignore[attr-defined]  # set by Lightning's connectors
        evaluate = ModelEvaluator(
            pl_module,
            self.loop.space,
            on_device(trainer, self._batches(data)),
            num_classes=data.num_classes,
            metric=_AUROC(data.num_classes),
            context=trainer.strategy.precision_plugin.forward_context,
        )
        server_model = self.loop.space.read(pl_module)
        all_clients = list(range(data.num_clients))
        # Evaluate one client at a time if clients have samples of their own, or unshared parts of the model.
        groups = [all_clients]
        if self.tests == "own" or self.loop.space.private_names:
            groups = [[client] for client in all_clients]

        scores_of_groups: list[Tensor] = []
        for clients in groups:
            if self.tests == "own":
                test_loader = data.client_loader(clients[0], "test")
                evaluate = evaluate.with_batches(on_device(trainer, test_loader))
            scores_of_groups.append(self._scores_of(clients, server_model, evaluate))
        received, trained, global_scores = torch.cat(scores_of_groups, dim=1).mT
        mean_global_scores = global_scores.mean(1, keepdim=True)
        self.scores["received"] = dict(zip(MEASURES, received))
        self.scores["trained"] = dict(zip(MEASURES, trained))
        self.scores["global"] = dict(zip(MEASURES, mean_global_scores))

    def _scores_of(
        self,
        clients: Sequence[int],
        server: Tensor,
        evaluate: ModelEvaluator,
    ) -> Tensor:
        """Compute the scores of the received, the trained and the global models of k clients, in this order,
        ``[3, k, number of measures]``.

        Args:
            clients: the k clients; only one client if clients keep parts of the model to themselves.
            server: the global model ``[P]``, which is also that of clients without a model of their own.
            evaluate: evaluates models on these clients' test samples.
        """
        received = self.loop.received()
        trained = {**received, **self.loop.trained}
        vectors = []
        for vector_by_client in (received, trained, {}):
            for client in clients:
                vector = vector_by_client.get(client, server)
                vectors.append(vector)
        # Equal models are evaluated only once.
        models = torch.stack(vectors)
        distinct, positions = models.unique(dim=0, return_inverse=True)
        positions = positions.cpu()  # as scores are
        shape = (3, len(clients), -1)
        scores = _values(evaluate, distinct)[positions].view(shape)
        if self.loop.space.private_names:
            (client,) = clients
            private = self.loop.clients[client].request(kept_private)
            evaluate_private = evaluate.with_batches(None, partial(dict, private))
            private_scores = _values(evaluate_private, distinct)[positions].view(shape)
            # The global model has the server's entries where clients keep theirs.
            scores[:2] = private_scores[:2]
        return scores


class _AUROC(ClassScores):
    """The scores of a classifier, reduced to the AUROC."""

    def compute(self) -> Tensor:  # type: ignore[override]  # one of its scores, not all
        return super().compute()["auroc"]


def kept_private(local: LocalData) -> dict[str, Tensor]:
    """Return the entries of the model that a client does not share, ``{name: tensor}``. Only a simulation asks this."""
    return dict(local.private)


def _values(evaluate: ModelEvaluator, models: Tensor) -> Tensor:
    """Score K models, given as vectors ``[K, P]``, by accuracy, balanced accuracy and AUROC; return ``[K, 3]``, with
    the scores in this order (:data:`MEASURES`)."""
    scores = evaluate(models)
    return torch.stack(
        [scores.value("metric" if name == "auroc" else name) for name in MEASURES], dim=1
    )
