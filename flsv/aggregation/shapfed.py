"""ShapFed-WA: weights in proportion to what the clients have contributed so far.

Tastan et al., "Redefining Contributions: Shapley-Driven Federated Learning", IJCAI 2024, equations 6-7 and Algorithm 1.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flsv.aggregation.base import Aggregator
from flsv.functional import participant_weights
from flsv.round import Round
from flsv.strategy import Contributions


class ShapFedWA(Aggregator):
    """w = sum_i gamma~_i w_i, with the gamma~ that the class-specific Shapley values of the rounds before give.

    The order is Algorithm 1's: round t is aggregated with the contributions up to round t-1 (all equal in the first
    round), then the contributions are updated with round t's aggregate.

    Where the paper is silent: a client whose contribution was never measured (it joins for the first time under partial
    participation) counts as the mean of the measured clients of its cohort. The cohort's weights sum to 1.

    Args:
        metric: the name of a :class:`flsv.metrics.ClassSpecificShapley` among the loop's metrics.

    Example:
        >>> ShapFedWA(metric="cssv")
        ShapFedWA(metric='cssv')
    """

    metric_shape = ("n", "M")

    def __init__(self, metric: str = "cssv") -> None:
        self.metric: str = metric

    def weights(self, round: Round, contributions: Contributions) -> Tensor:
        cssv = contributions.get(self.metric)
        if cssv is None:
            return torch.full((len(round),), 1 / len(round))
        gamma, _ = participant_weights(cssv[round.client_ids.to(cssv.device)].double())
        known = ~gamma.isnan()
        mean = gamma[known].mean() if known.any() else torch.ones_like(gamma).mean()
        gamma = torch.where(known, gamma, mean)
        total = gamma.sum()
        return gamma / total if total > 0 else torch.full_like(gamma, 1 / len(gamma))
