"""Aggregator: how the clients' models become the next global model; and FedAvg, their average.

McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data", AISTATS 2017, Algorithm 1.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar, Literal

import torch
from torch import Tensor

from flsv.core import Round
from flsv.core.strategy import Contributions, Strategy
from flsv.utilities.declared import Positive


class Aggregator(Strategy):
    """Base class. A linear aggregator overrides ``weights``; any other overrides ``aggregate``.

    Args:
        server_lr: the global model moves this share of the way to the aggregate. Buffers (BatchNorm) move all the way.
            The server sees to it: an aggregator of one's own need not know it, and moves all the way then.

    Raises:
        ConfigurationError: a server_lr that is not positive.
    """

    server_lr: float = 1.0
    #: Whether it asks who the clients are or how they trained, beside their models and samples.
    of_clients: ClassVar[bool] = False

    def __init__(self, *, server_lr: Positive = 1.0) -> None:
        self.server_lr = server_lr

    @abstractmethod
    def weights(self, round: Round, contributions: Contributions) -> Tensor:
        """The weight ``[k]`` of every client of the round in x + sum_i w_i (x_i - x).

        Args:
            round: the round, before aggregation.
            contributions: the metrics' values. Those of metrics that need the aggregate are of the round before.
        """

    def aggregate(self, round: Round, contributions: Contributions) -> tuple[Tensor, Tensor]:
        """The next global vector ``[P]`` (before the server's learning rate) and the clients' weights ``[k]`` in it."""
        weights = self.weights(round, contributions).to(round.client_vectors)
        return round.combine(weights), weights


class FedAvg(Aggregator):
    """Weights in proportion to the clients' training samples, or all equal.

    Args:
        weighting: ``"samples"`` (McMahan et al.) or ``"uniform"``.
        server_lr: see :class:`flsv.aggregation.Aggregator`.

    Example:
        >>> FedAvg(weighting="uniform")
        FedAvg(weighting='uniform')
    """

    def __init__(self, weighting: Literal["samples", "uniform"] = "samples", *, server_lr: Positive = 1.0) -> None:
        super().__init__(server_lr=server_lr)
        self.weighting = weighting

    def weights(self, round: Round, contributions: Contributions) -> Tensor:
        samples = round.num_samples.double()
        return samples / samples.sum() if self.weighting == "samples" else torch.full_like(samples, 1 / len(samples))
