"""FedAvg: the average of the clients' models.

McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data", AISTATS 2017, Algorithm 1.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from flsv.aggregation.base import Aggregator
from flsv.core import Round
from flsv.core.strategy import Contributions
from flsv.utilities.declared import Positive


class FedAvg(Aggregator):
    """Average of the clients' models, weighted by samples or equally.

    Args:
        weighting: the clients' weights: ``"samples"``, in proportion to their numbers of samples (McMahan et al.), or
            ``"uniform"``, equal.
        server_lr: the server's learning rate, see :class:`flsv.aggregation.Aggregator`.

    Example:
        >>> FedAvg(weighting="uniform")
        FedAvg(weighting='uniform')
    """

    def __init__(
        self, weighting: Literal["samples", "uniform"] = "samples", *, server_lr: Positive = 1.0
    ) -> None:
        super().__init__(server_lr=server_lr)
        self.weighting = weighting

    def weights(self, round: Round, contributions: Contributions) -> Tensor:
        num_samples = round.num_samples.double()
        if self.weighting == "samples":
            return num_samples / num_samples.sum()
        return torch.full_like(num_samples, 1 / len(num_samples))
