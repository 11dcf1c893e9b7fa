"""FedCE: client weights in proportion to estimated contributions.

Jiang et al., "Fair Federated Medical Image Segmentation via Client Contribution Estimation", CVPR 2023.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flsv.aggregation.base import Aggregator
from flsv.core import Round
from flsv.core.strategy import Contributions
from flsv.functional.nan_to_mean import nan_to_mean
from flsv.utilities.declared import Positive


class FedCE(Aggregator):
    """FedCE's aggregator x + sum_i c_i d_i. Here x is the global model, d_i client i's update and c_i its contribution
    as estimated in earlier rounds. In the first round the weights are equal.

    All estimates affect the weights from the next round on. In the authors' code this holds for the clients' errors
    only. The directions of a round's updates affect the weights of the same round. Choices that the paper, which has
    full participation, leaves open: the cohort's weights are scaled to sum to 1, and a client without an estimate gets
    the mean of the others' estimates.

    Args:
        metric: the name of a :class:`flsv.metrics.ContributionEstimation` among the loop's metrics.
        server_lr: the server's learning rate, see :class:`flsv.aggregation.Aggregator`.

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
            ones = torch.ones_like(round.client_ids, dtype=torch.float64)
            return ones / len(round)
        cohort_values = nan_to_mean(values)[round.client_ids].double()
        return cohort_values / cohort_values.sum()
