"""Aggregator: how the clients' models become the next global model."""

from __future__ import annotations

from abc import abstractmethod

from torch import Tensor

from flsv.round import Round
from flsv.strategy import Contributions, Strategy


class Aggregator(Strategy):
    """Base class. A linear aggregator overrides ``weights``; one that is not linear overrides ``aggregate``."""

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
