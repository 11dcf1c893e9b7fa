"""UniformSampler: a fixed number of clients, drawn without replacement; FullParticipation: all clients."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy

import torch
from torch import Tensor

from flsv.core.strategy import Contributions
from flsv.sampling.base import ClientSampler
from flsv.sampling.fixed_cohort import FixedCohort
from flsv.utilities.declared import Count


class FullParticipation(ClientSampler):
    """Sampler of all clients in every round.

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

    def among(self, members: Sequence[int]) -> ClientSampler:
        return FixedCohort(members)


class UniformSampler(ClientSampler):
    """Sampler that draws ``cohort_size`` clients without replacement, as in FedAvg's Algorithm 1 (McMahan et al. 2017).

    Args:
        cohort_size: number of clients per round, at least 1.

    Raises:
        ConfigurationError: the cohort size is below 1 or, before training, above the number of clients.

    Example:
        >>> UniformSampler(2).sample(5, {}, torch.Generator().manual_seed(0))
        tensor([0, 4])
        >>> UniformSampler(2).among([1, 2, 4]).sample(5, {}, torch.Generator().manual_seed(0))
        tensor([1, 4])
    """

    def __init__(self, cohort_size: Count) -> None:
        self.cohort_size = cohort_size

    def sample(
        self, num_clients: int, contributions: Contributions, generator: torch.Generator, round_index: int = 0
    ) -> Tensor:
        order = torch.randperm(num_clients, generator=generator)
        if self.members is not None:  # the first of them in an order of all clients, which all coalitions share
            order = order[torch.isin(order, torch.tensor(self.members))]
        return order[: self.cohort_size].sort().values

    def inclusion_probabilities(self, num_clients: int, contributions: Contributions, round_index: int = 0) -> Tensor:
        if self.members is None:
            return torch.full((num_clients,), self.cohort_size / num_clients)
        chance = min(1.0, self.cohort_size / len(self.members))
        return torch.zeros(num_clients).index_fill(0, torch.tensor(self.members), chance)

    def among(self, members: Sequence[int]) -> ClientSampler:
        own = copy(self)
        own.members = sorted(members)
        return own
