"""Aggregator: base class of the rules that combine the clients' models into the next global model."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

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
