"""ClientSampler: who takes part in a round."""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor

from flsv.strategy import Contributions, Strategy


class ClientSampler(Strategy):
    """Base class: a random cohort, and everybody's chance to be in it."""

    @abstractmethod
    def sample(
        self, num_clients: int, contributions: Contributions, generator: torch.Generator, round_index: int = 0
    ) -> Tensor:
        """The cohort's client ids, ascending and without repetition.

        Args:
            num_clients: n, all clients of the federation.
            contributions: the metrics' values after the round before.
            generator: the only source of chance; it depends on the run's seed and the round.
            round_index: the round, from 0.
        """

    @abstractmethod
    def inclusion_probabilities(self, num_clients: int, contributions: Contributions, round_index: int = 0) -> Tensor:
        """The probability ``[n]`` of each client to be in the cohort that ``sample`` would draw.

        Aggregators that estimate a sum over all clients without bias divide by it (Horvitz and Thompson 1952).
        """

    def check(self, num_clients: int) -> None:
        """Raise a :class:`flsv.errors.ConfigurationError` if no cohort can be drawn from ``num_clients`` clients."""


class FullParticipation(ClientSampler):
    """Every client, every round.

    Example:
        >>> FullParticipation().sample(3, {}, torch.Generator())
        tensor([0, 1, 2])
    """

    def sample(
        self, num_clients: int, contributions: Contributions, generator: torch.Generator, round_index: int = 0
    ) -> Tensor:
        return torch.arange(num_clients)

    def inclusion_probabilities(self, num_clients: int, contributions: Contributions, round_index: int = 0) -> Tensor:
        return torch.ones(num_clients)
