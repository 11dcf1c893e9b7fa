"""FixedCohort: the same clients in every round."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flsv.errors import ConfigurationError
from flsv.sampling.base import ClientSampler
from flsv.strategy import Contributions


class FixedCohort(ClientSampler):
    """These clients and nobody else, as if the federation had no others.

    Args:
        clients: their ids, at least one.

    Raises:
        ConfigurationError: no clients, a client twice, or (before training) one that does not exist.

    Example:
        >>> FixedCohort([3, 0]).sample(5, {}, torch.Generator())
        tensor([0, 3])
    """

    def __init__(self, clients: Sequence[int]) -> None:
        self.clients = sorted(clients)
        if not self.clients or len(set(self.clients)) != len(self.clients) or self.clients[0] < 0:
            raise ConfigurationError(f"FixedCohort(clients={list(clients)}): expected different client ids, from 0.")

    def sample(
        self, num_clients: int, contributions: Contributions, generator: torch.Generator, round_index: int = 0
    ) -> Tensor:
        return torch.tensor(self.clients)

    def inclusion_probabilities(self, num_clients: int, contributions: Contributions, round_index: int = 0) -> Tensor:
        chances = torch.zeros(num_clients)
        chances[self.clients] = 1
        return chances

    def check(self, num_clients: int) -> None:
        if self.clients[-1] >= num_clients:
            raise ConfigurationError(f"{self!r} cannot be met: the federation has clients 0 to {num_clients - 1} only.")
