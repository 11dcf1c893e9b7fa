"""FedAvgM: momentum at the server.

Hsu, Qi and Brown, "Measuring the Effects of Non-Identical Data Distribution for Federated Visual Classification", 2019,
section 4.3.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import torch
from torch.optim import Optimizer

from flsv.aggregation.server_optimizer import ServerOptimizer
from flsv.utilities.declared import Momentum, Positive


class FedAvgM(ServerOptimizer):
    """FedAvg with server momentum: v <- momentum v + Delta; x <- x + lr v, with x the global model and Delta the
    clients' mean update, by ``torch.optim.SGD``.

    Args:
        lr: the server's learning rate; in the paper 1, and below 1 if the momentum is 0.7 or more.
        momentum: the momentum, in [0, 1).
        weighting: the clients' weights, see :class:`flsv.aggregation.FedAvg`.

    Raises:
        ConfigurationError: an argument is out of range.

    Example:
        >>> FedAvgM(momentum=0.7)
        FedAvgM(momentum=0.7)
    """

    def __init__(
        self, lr: Positive = 1.0, momentum: Momentum = 0.9, weighting: Literal["samples", "uniform"] = "samples"
    ) -> None:
        self.lr = lr
        self.momentum = momentum
        super().__init__(self._sgd, weighting)

    def _sgd(self, params: Iterable) -> Optimizer:
        return torch.optim.SGD(params, lr=self.lr, momentum=self.momentum)
