"""Asks clients how good the aggregate is without their own part in it."""

from __future__ import annotations

import torch
from torch import Tensor

from flsv.functional.peers import without_own
from flsv.games.performance import ModelScore
from flsv.participants import LocalData
from flsv.round import Round


def secure_sum(round: Round) -> Tensor:
    """``[P]``: the average of the cohort's models by this round's aggregation weights, made to sum to 1.

    It is what a server would be given by secure aggregation: one sum, and no single model.
    """
    assert round.aggregation_weights is not None
    return round.combine(shares(round.aggregation_weights).to(round.client_vectors))


def shares(weights: Tensor) -> Tensor:
    """Weights that sum to 1, float64 ``[k]`` on the CPU; equal ones where all are 0.

    Raises:
        ValueError: a weight below 0.
    """
    weights = weights.cpu().double()
    if bool((weights < 0).any()):
        raise ValueError(
            f"aggregation weights {weights.tolist()}: a client with a weight below 0 cannot be taken out of the "
            "average. Use an aggregator whose weights are at least 0, such as FedAvg."
        )
    total = weights.sum()
    return weights / total if total > 0 else torch.full_like(weights, 1 / len(weights))


def leave_self_out(
    local: LocalData, aggregate: Tensor, weight: float, performance: str | ModelScore = "accuracy", gain: bool = False
) -> Tensor:
    """At the client: a number ``[]``, float64, the score on its validation samples of the others' average.

    Args:
        local: the client's; it has taken part in the round.
        aggregate: ``[P]``, the average of all.
        weight: the client's in it.
        performance: what models are measured by.
        gain: less the score of the model that it started the round from.

    Where nobody else has any weight, the others' average is the model that it started from.
    """
    assert local.start is not None
    assert local.sent is not None
    others = without_own(aggregate, local.sent, weight)
    models = torch.stack([local.start if others is None else others, local.start][: 2 if gain else 1])
    scores = local.utility(models, performance)
    return local.told("gain", scores[0] - scores[1]) if gain else local.told("score", scores[0])
