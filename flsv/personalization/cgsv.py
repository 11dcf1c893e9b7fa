"""CGSV's reward: the better a participant's reputation, the more of the aggregate it receives.

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


class SparsifiedReward(Personalizer):
    """Client i continues from its start point of this round plus the largest entries of the aggregate u_N.

    Of every layer (parameter tensor) it receives the min(ceil(q_i size), size - 1) entries of the largest magnitude,
    with

        q_i = tanh(beta r_i) / max_j tanh(beta r_j)

    over the reputations r after this round. That is the count of the authors' code: even the best client, q = 1, does
    not receive the smallest entry of a layer. A layer of one entry, at which that code fails, is received by all whose
    q is above 0. What the client has learnt itself reaches it only through u_N. Buffers (BatchNorm's statistics)
    are the new global ones.

    u_N is the step of the global model, whatever the aggregator and ``server_lr``; with
    :class:`flsv.aggregation.CGSV` it is the paper's: ``configs/cgsv.yaml``. A client outside the cohort receives
    nothing; one that was in none yet starts from the global model.

    Args:
        metric: the name of a :class:`flsv.metrics.CosineGradientShapley`, or another metric ``[n]``, among the loop's
            metrics; below 0 or NaN counts as 0.
        beta: above 0; the larger, the more equal the rewards (the paper's altruism degree).

    Raises:
        ConfigurationError: beta not above 0.

    Example:
        >>> SparsifiedReward(beta=2.0)
        SparsifiedReward(beta=2.0)
    """

    metric_shape = ("n",)

    def __init__(self, metric: str = "cgsv", beta: Positive = 1.0) -> None:
        self.metric: str = metric
        self.beta = beta

    def shares(self, reputation: Tensor) -> Tensor:
        """q ``[n]`` in [0, 1] from reputations ``[n]``; all 1 if nobody has any."""
        merit = torch.tanh(self.beta * reputation.double().nan_to_num(0.0).clamp_min(0))
        best = merit.max()
        return merit / best if best > 0 else torch.ones_like(merit)

    def personalize(self, round: Round, contributions: Contributions, models: Starts) -> Starts:
        assert round.server_vector is not None
        shares = self.shares(contributions[self.metric])
        cut = round.space.num_parameters
        sizes = parameter_sizes(round.space)
        ranks = layer_ranks(round.server_update[:cut], sizes)
        result = {}
        for client in round.client_ids.tolist():
            kept = ranks_below(ranks, sizes, float(shares[client]))
            vector = round.server_vector.clone()
            vector[:cut] = models.get(client, round.global_vector)[:cut] + round.server_update[:cut] * kept
            result[client] = vector
        return result


def layer_ranks(update: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    """Every entry's place by magnitude in its layer, 0 for the largest: ``[P]`` to one tensor per layer."""
    return [layer.abs().argsort(descending=True, stable=True).argsort() for layer in update.split(list(sizes))]


def ranks_below(ranks: Sequence[Tensor], sizes: Sequence[int], share: float) -> Tensor:
    """Which entries ``[P]`` are among the min(ceil(share * size), size - 1) largest of their layer.

    Of a layer of one entry, that one where the share is above 0.

    Example:
        >>> update = torch.tensor([1.0, -3.0, 2.0, 5.0])
        >>> ranks_below(layer_ranks(update, [3, 1]), [3, 1], share=0.5)
        tensor([False,  True,  True,  True])
    """
    counts = [min(math.ceil(share * size), max(size - 1, 1)) for size in sizes]
    return torch.cat([rank < count for rank, count in zip(ranks, counts)])


def parameter_sizes(space: ParameterSpace) -> list[int]:
    """The number of a vector's entries in each layer; parameters come before buffers."""
    sizes = [math.prod(shape) for shape in space.shapes]
    return [size for size, end in zip(sizes, accumulate(sizes)) if end <= space.num_parameters]
