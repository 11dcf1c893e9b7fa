"""pFedSV's aggregation weights: how much of each model a client mixes into its own.

Wu et al., "Rethinking Personalized Client Collaboration in Federated Learning", IEEE Transactions on Mobile Computing,
2024, equations 6 and 7. For the client's own model equation 6 divides by the distance of a model to itself; what is put
there instead is said in ``self_weight``.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from flsv.errors import ConfigurationError

SelfWeight = Literal["mean", "exclude", "min"]


def check_self_weight(self_weight: str) -> None:
    """Raise ConfigurationError unless there is such a policy."""
    if self_weight not in get_args(SelfWeight):
        raise ConfigurationError(f"self_weight={self_weight!r}: expected one of {get_args(SelfWeight)}.")


def personalised_weights(values: Tensor, distances: Tensor, own: int, self_weight: SelfWeight = "mean") -> Tensor:
    r"""Weights of the models that a client has at hand.

    .. math:: w_j = \frac{\max(v_j, 0)}{d_j}, \qquad w^*_j = w_j / \textstyle\sum_l w_l

    Nobody worth more than 0: the client keeps its own model. A model at distance 0 has no finite w; in the limit all
    weight goes to the models at distance 0 that are worth more than 0, in proportion to their values. They equal the
    client's own, so it keeps its model then too.

    Args:
        values: ``[s]`` Shapley values v of the models, the client's own among them.
        distances: ``[s]`` Euclidean distances d of the models to the client's own, not negative; the entry of its own
            is not read.
        own: the place of the client's own model.
        self_weight: the distance that its own model is given: the ``"mean"`` of the others' or the least of them
            (``"min"``). ``"exclude"``: its own model has no weight, unless no other is worth more than 0. A tiny
            distance instead would make its weight 1, which is local training.

    Returns:
        ``[s]``, not negative, sums to 1.

    Raises:
        ConfigurationError: an unknown ``self_weight``.
        ValueError: shapes that differ, a place outside them, values that are not finite, negative distances.

    Example:
        >>> values, distances = torch.tensor([0.3, 0.2, -0.1]), torch.tensor([0.0, 2.0, 4.0])
        >>> personalised_weights(values, distances, own=0)
        tensor([0.5000, 0.5000, 0.0000])
        >>> personalised_weights(values, distances, own=0, self_weight="min")
        tensor([0.6000, 0.4000, 0.0000])
    """
    check_self_weight(self_weight)
    if values.ndim != 1 or values.shape != distances.shape or not 0 <= own < len(values):
        raise ValueError(
            f"expected values [s], distances [s] and own in 0 .. s - 1, got {list(values.shape)}, "
            f"{list(distances.shape)} and {own}."
        )
    others = torch.arange(len(values), device=values.device) != own
    worth, apart = values.double().clamp_min(0), distances.double().clone()
    if not bool(values.isfinite().all()) or not bool((apart[others] >= 0).all()) or bool(apart[others].isinf().any()):
        raise ValueError(f"expected finite values and distances not below 0: {values.tolist()}, {distances.tolist()}.")
    if self_weight == "exclude":
        worth = worth * others
    if not bool((worth * others > 0).any()):
        return (~others).to(values)
    apart[own] = apart[others].mean() if self_weight == "mean" else apart[others].min()
    same = (apart == 0) & (worth > 0)
    weights = worth * same if bool(same.any()) else worth / apart.clamp_min(torch.finfo(torch.float64).tiny)
    return (weights / weights.sum()).to(values)
