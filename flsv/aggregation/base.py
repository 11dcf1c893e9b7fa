"""Aggregator: base class of the rules that combine the clients' models into the next global model."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

from torch import Tensor

from flsv.core import Round
from flsv.core.strategy import Contributions, Strategy
from flsv.utilities.declared import Positive


class Aggregator(Strategy):
    """Base class of aggregators. A linear one overrides :meth:`weights`; any other overrides :meth:`aggregate`.

    Args:
        server_lr: share of the way to the aggregate that the global model moves. Its buffers (BatchNorm's statistics)
            move all the way. The server applies it, so that a subclass need not; a subclass without this argument
            moves all the way.

    Raises:
        ConfigurationError: a server_lr that is not positive.
    """

    server_lr: float = 1.0
    #: Whether it reads the clients' identities or numbers of steps, beside their models and numbers of samples.
    of_clients: ClassVar[bool] = False

    def __init__(self, *, server_lr: Positive = 1.0) -> None:
        self.server_lr = server_lr

    @abstractmethod
    def weights(self, round: Round, contributions: Contributions) -> Tensor:
        """Compute the weight ``[k]`` of every client of the round in x + sum_i w_i (x_i - x).

        Args:
            round: the round, before aggregation.
            contributions: the metrics' values; those of metrics that need the aggregate are the previous round's.
        """

    def aggregate(self, round: Round, contributions: Contributions) -> tuple[Tensor, Tensor]:
        """Compute the next global vector ``[P]``, before ``server_lr`` applies, and the clients' weights ``[k]``."""
        weights = self.weights(round, contributions).to(round.client_vectors)
        return round.combine(weights), weights
