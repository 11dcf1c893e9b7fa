"""FedCE: client weights in proportion to estimated contributions.

Jiang et al., "Fair Federated Medical Image Segmentation via Client Contribution Estimation", CVPR 2023.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flsv.aggregation.base import Aggregator
from flsv.core import Round
from flsv.core.strategy import Contributions
from flsv.functional.known_or_mean import known_or_mean
from flsv.utilities.declared import Positive


class FedCE(Aggregator):
    """x + sum_i c_i d_i with c_i the estimates of the rounds before; equal weights in the first round.

    The authors' code counts the directions of the current round in its weights, and here they count from
    the next one on, as the errors do in both. Where the paper, with full participation, is silent: the cohort's weights
    are made to sum to 1, and a client without an estimate counts as the mean of the others.

    Args:
        metric: the name of a :class:`flsv.metrics.ContributionEstimation` among the loop's metrics.
        server_lr: see :class:`flsv.aggregation.Aggregator`.

    Example:
        >>> FedCE()
        FedCE()
    """

    metric_shape = ("n",)

    def __init__(self, metric: str = "fedce", *, server_lr: Positive = 1.0) -> None:
        super().__init__(server_lr=server_lr)
        self.metric: str = metric

    def weights(self, round: Round, contributions: Contributions) -> Tensor:
        values = contributions.get(self.metric)
        if values is None:
            return torch.full((len(round),), 1 / len(round), dtype=torch.float64, device=round.client_ids.device)
        cohort = known_or_mean(values)[round.client_ids].double()
        return cohort / cohort.sum()
