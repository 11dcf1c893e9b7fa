"""Every metric of ``flsv.metrics``, and the same six rounds for each of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

from flsv.metrics import (
    CalibratedOTGradient,
    ClassSpecificShapley,
    CoalitionValue,
    CollaborativeFairness,
    CommunicationCost,
    ContributionEstimation,
    CosineGradientShapley,
    CumulativeShapley,
    DecayedShapley,
    DomainRelevance,
    EverybodyElse,
    GradientAgreement,
    GradientAgreementGame,
    GradientShapley,
    InRunShapley,
    LeaveOneOut,
    LowerBoundShapley,
    MeanTestAccuracy,
    OneRoundShapley,
    PartialFederatedShapley,
    PrivacyLoss,
    SurrogateFederatedShapley,
    WassersteinContribution,
)
from flsv.participants import Client, LocalData
from flsv.privacy import GaussianPrivacy
from flsv.valuation import clients_of, server_of

N, M, P = 5, 3, 4

#: Who takes part. Client 4 never does; client 3 not in the first half, client 1 not in the second.
COHORTS = [[0, 1, 2], [1, 2], [0, 2], [2, 3], [0, 3], [0, 2, 3]]

MAKERS: dict[str, Callable[[], Metric]] = {
    "CalibratedOTGradient": lambda: CalibratedOTGradient(N, features="pixels", support=2, iterations=1, pictures=0),
    "ClassSpecificShapley": lambda: ClassSpecificShapley(N, M, momentum=0.6),
    "CoalitionValue": lambda: CoalitionValue(N, value="banzhaf", fold="sum"),
    "CollaborativeFairness": CollaborativeFairness,
    "CommunicationCost": lambda: CommunicationCost(N),
    "ContributionEstimation": lambda: ContributionEstimation(N, combine="plus"),
    "CosineGradientShapley": lambda: CosineGradientShapley(N, alpha=0.7),
    "CumulativeShapley": lambda: CumulativeShapley(N),
    "DecayedShapley": lambda: DecayedShapley(N, decay=0.7),
    "DomainRelevance": lambda: DomainRelevance(N, alpha=0.4),
    "EverybodyElse": lambda: EverybodyElse(N),
    "GradientAgreement": lambda: GradientAgreement(N),
    "GradientAgreementGame": lambda: GradientAgreementGame(N),
    "GradientShapley": lambda: GradientShapley(N, momentum=0.5),
    "InRunShapley": lambda: InRunShapley(N, M),
    "LeaveOneOut": lambda: LeaveOneOut(N, momentum=0.3),
    "LowerBoundShapley": lambda: LowerBoundShapley(N),
    "MeanTestAccuracy": lambda: MeanTestAccuracy(N),
    "OneRoundShapley": lambda: OneRoundShapley(len(COHORTS), N, coalition_weights="fixed"),
    "PartialFederatedShapley": lambda: PartialFederatedShapley(N, M, momentum=0.5),
    "PrivacyLoss": lambda: PrivacyLoss(GaussianPrivacy(clip=1.0, noise_multiplier=2.0), N),
    "SurrogateFederatedShapley": lambda: SurrogateFederatedShapley(N),
    "WassersteinContribution": lambda: WassersteinContribution(N, features="pixels", support=2, iterations=1),
}

#: What a run's parts cannot be put together of.
WHOLE = ("OneRoundShapley",)


class Sigmoid:
    """The score of models: of the sum of their entries."""

    def __init__(self, models: Tensor) -> None:
        self.models = models

    def value(self, metric: Any) -> Tensor:
        return self.models.double().sum(1).sigmoid()


def judges(ids: Tensor, models: Tensor) -> list[Client]:
    """Clients that have trained these models ``[k, P]`` from zero, and judge models by :class:`Sigmoid`."""
    clients = []
    for i, model in zip(ids.tolist(), models):
        counts = torch.tensor([4, 4])
        data = LocalData(f"client {i}", lambda split: [], counts, 3 * counts, evaluator=lambda batches: Sigmoid)
        data.visit(torch.zeros_like(model), model)
        clients.append(Client(i, data))
    return clients


def feed(metric: Metric, index: int) -> None:
    """Round ``index``: what it holds depends on the index only."""
    draw = torch.Generator().manual_seed(index)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw)

    ids = torch.tensor(COHORTS[index])
    k = len(ids)
    shares = torch.full((k,), 1 / k)
    arguments: dict[str, Any] = {"client_ids": ids}
    name = type(metric).__name__
    if name == "ClassSpecificShapley":
        arguments |= {"client_heads": normal(k, M, 5), "server_head": normal(M, 5)}
    elif name == "CollaborativeFairness":
        arguments = {"standalone": normal(2), "final": normal(2)}
    elif name == "CommunicationCost":
        arguments |= {"uploaded": torch.randint(9, (k,), generator=draw), "downloaded": ids + index}
    elif name in ("ContributionEstimation", "EverybodyElse"):
        models = normal(k, P)
        arguments |= {"aggregation_weights": shares, "aggregate": models.mean(0), "clients": judges(ids, models)}
        if name == "ContributionEstimation":
            arguments["client_updates"] = models
    elif name == "CosineGradientShapley":
        arguments |= {"client_updates": normal(k, P), "num_samples": 10 + ids, "aggregation_weights": shares}
    elif name == "DomainRelevance":
        values = normal(k, N)
        arguments["peer_values"] = values.masked_fill(values < 0, float("nan"))
    elif name in ("GradientAgreement", "GradientAgreementGame"):
        arguments |= {"gradient_products": normal(k), "client_updates": normal(k, P), "num_samples": 10 + ids}
        if name == "GradientAgreementGame":
            worth = normal(k)
            arguments |= {"round_index": index, "utility": lambda masks: masks.float() @ worth}
    elif name == "GradientShapley":
        arguments |= {"gradient_products": normal(k), "hessian_products": None}
    elif name == "InRunShapley":
        arguments |= {"in_run_values": normal(k, M), "gradient_products": normal(k), "aggregation_weights": shares}
    elif name == "MeanTestAccuracy":
        arguments = {"client_id": index % 4, "preds": normal(6, 2), "target": torch.arange(6) % 2}
    elif name == "OneRoundShapley":
        arguments |= {"round_index": index, "global_vector": torch.ones(P), "client_updates": normal(k, P)}
        arguments |= {"aggregation_weights": shares, "utility": _game}
    elif name in ("CalibratedOTGradient", "WassersteinContribution"):
        labels = torch.arange(6) % 2
        everyone = clients_of([(normal(6, 2), labels) for _ in range(N)])
        arguments |= {"clients": [everyone[i] for i in ids], "server_data": server_of(normal(6, 2), labels)}
        arguments["generator"] = draw
    elif name != "PrivacyLoss":
        worth = normal(k, M) if name == "PartialFederatedShapley" else normal(k)
        arguments["utility"] = lambda masks: masks.float() @ worth
        if name == "DecayedShapley":
            arguments["round_index"] = index
    metric.update(**arguments)


def _game(start: Tensor, updates: Tensor, weights: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda masks: (start + masks.float() @ (weights[:, None] * updates)).sum(-1)


def fed(name: str, rounds: Any) -> Metric:
    """A new metric that has seen these rounds."""
    metric = MAKERS[name]()
    for index in rounds:
        feed(metric, index)
    return metric


def said(metric: Metric, value: Tensor | None = None) -> dict[str, Tensor]:
    """All that a metric says; by default with the value that it computes."""
    diagnostics = metric.diagnostics() if hasattr(metric, "diagnostics") else {}
    return {"value": metric.compute() if value is None else value, **diagnostics}


def assert_same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for what in one:
        torch.testing.assert_close(one[what], other[what], equal_nan=True, msg=lambda m, w=what: f"{w}: {m}")
