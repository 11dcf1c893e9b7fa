"""SparsifiedReward (CGSV): clients of higher reputation receive more elements of the aggregated update.

Xu et al., "Gradient Driven Rewards to Guarantee Fairness in Collaborative Machine Learning", NeurIPS 2021,
Algorithm 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from flsv.core import Round
from flsv.core.parameter_space import ParameterSpace
from flsv.core.strategy import Contributions
from flsv.personalization.base import Personalizer, Starts
from flsv.utilities.declared import Positive
from flsv.utilities.host_copies import on_host


class SparsifiedReward(Personalizer):
    """Personalizer that rewards clients with elements of the aggregated update. The largest are added to a client's
    start point of this round.

    Of each layer (parameter tensor) of the aggregated update u_N, with ``size`` elements, client i receives the
    min(ceil(q_i size), size - 1) elements of the largest magnitude, where

        q_i = tanh(beta r_i) / max_j tanh(beta r_j)

    and r_i is the client's reputation after this round. As in the authors' code, even the best client, with q = 1, does
    not receive the smallest element of a layer. If a layer has only one, all clients with q above 0 receive it. A
    client's own update changes its start point only as a part of u_N. Buffers (BatchNorm's statistics) are those of the
    new global model.

    u_N is the step of the global model, with any aggregator and ``server_lr``. With :class:`flsv.aggregation.CGSV` it
    is the step of the paper: ``configs/cgsv.yaml``. A client outside the cohort receives nothing. A client that was in
    no cohort yet starts from the global model.

    Args:
        metric: name of a :class:`flsv.metrics.CosineGradientShapley`, or of another metric with one value per client,
            among the loop's metrics. Negative values and NaN count as 0.
        beta: altruism degree of the paper, above 0. The larger it is, the more equal are the rewards.

    Raises:
        ConfigurationError: ``beta`` is not above 0.

    Example:
        >>> SparsifiedReward(beta=2.0)
        SparsifiedReward(beta=2.0)
    """

    metric_shape = ("n",)

    def __init__(self, metric: str = "cgsv", beta: Positive = 1.0) -> None:
        self.metric: str = metric
        self.beta = beta

    def shares(self, reputation: Tensor) -> Tensor:
        """Compute the shares q_i of the elements that clients receive, ``[n]`` in [0, 1], from ``reputation [n]``. All
        are 1 if no reputation is positive."""
        reputation = reputation.double().nan_to_num(0.0)
        merit = torch.tanh(self.beta * reputation.clamp_min(0))
        best = merit.max()
        if best > 0:
            return merit / best
        return torch.ones_like(merit)

    def personalize(self, round: Round, contributions: Contributions, models: Starts) -> Starts:
        assert round.server_vector is not None
        sent_fractions = self.shares(contributions[self.metric])  # [n]
        num_parameters = round.space.num_parameters
        layer_sizes = parameter_sizes(round.space)
        update = round.server_update[:num_parameters]
        ranks_by_layer = layer_ranks(update, layer_sizes)
        next_models = {}
        for client in on_host(round.client_ids):
            client_model = models.get(client, round.global_vector)
            fraction = float(sent_fractions[client])
            is_sent = largest_elements(ranks_by_layer, layer_sizes, fraction)  # [P]
            sent_update = update * is_sent
            # The buffers are those of the new global model.
            next_model = round.server_vector.clone()
            next_model[:num_parameters] = client_model[:num_parameters] + sent_update
            next_models[client] = next_model
        return next_models


def layer_ranks(
    update: Tensor,
    sizes: Sequence[int],
) -> list[Tensor]:
    """Rank the elements of each layer of an update by magnitude, the largest first."""
    ranks = []
    for layer in update.split(list(sizes)):
        largest_first = layer.abs().argsort(descending=True, stable=True)
        ranks.append(largest_first.argsort())  # each element's position when sorted
    return ranks


def largest_elements(
    ranks: Sequence[Tensor],
    sizes: Sequence[int],
    share: float,
) -> Tensor:
    """Select the min(ceil(share * size), size - 1) largest elements of each layer, bool ``[P]``."""
    # The largest element of a layer has rank 0.
    masks = []
    for ranks_of_layer, size in zip(ranks, sizes):
        max_selected = max(size - 1, 1)  # no client gets all elements, unless there is only one
        num_selected = min(math.ceil(share * size), max_selected)
        masks.append(ranks_of_layer < num_selected)
    return torch.cat(masks)


def parameter_sizes(space: ParameterSpace) -> list[int]:
    """Return the sizes of all parameter tensors, in the order of a vector."""
    sizes = [math.prod(shape) for shape in space.shapes]  # the buffers' sizes are the last
    sums = accumulate(sizes)
    return [size for size, total in zip(sizes, sums) if total <= space.num_parameters]
