"""FixedCohort and UniformSampler: cohorts of a fixed size, and equal probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import Annotated, Any, ClassVar

import torch
from annotated_types import Ge
from torch import Tensor

from flsv.core.strategy import Contributions
from flsv.sampling.base import ClientSampler
from flsv.utilities.arguments import client_number
from flsv.utilities.declared import Count
from flsv.utilities.errors import ConfigurationError


class FixedCohort(ClientSampler):
    """Sampler that draws the same clients in every round, as if there were no others.

    Args:
        clients: the clients, at least one: ids, or names as the run's tables print them.

    Raises:
        ConfigurationError: there are no clients, a client is named twice or, before training, a client does not exist.

    Example:
        >>> FixedCohort([3, 0]).sample(5, {}, torch.Generator())
        tensor([0, 3])
    """

    rules: ClassVar = (
        (
            lambda a: 0 < len(a.clients) == len(set(a.clients)),
            "expected at least one client, and each client once.",
        ),
    )

    def __init__(self, clients: Sequence[Annotated[int, Ge(0)] | str]) -> None:
        self.clients = list(clients)
        # Before `check`, clients that were given by name have no id.
        self._ids: Sequence[Any] = self.clients

    @property
    def members(self) -> Sequence[int]:  # type: ignore[override]  # the base class has an attribute
        return self._ids

    def sample(
        self,
        num_clients: int,
        contributions: Contributions,
        generator: torch.Generator,
        round_index: int = 0,
    ) -> Tensor:
        return torch.tensor(sorted(self._ids))

    def inclusion_probabilities(
        self,
        num_clients: int,
        contributions: Contributions,
        round_index: int = 0,
    ) -> Tensor:
        probabilities = torch.zeros(num_clients)
        probabilities[list(self._ids)] = 1
        return probabilities

    def among(self, members: Sequence[int]) -> ClientSampler:
        drawn_members = set(self._ids) & set(members)
        if drawn_members:
            return FixedCohort(sorted(drawn_members))
        raise ConfigurationError(
            f"{self!r} never draws the clients {list(members)}, so their coalition cannot be trained. Remove them from "
            "the data, or add them to the cohort."
        )

    def check(self, client_names: Sequence[str]) -> None:
        ids = []
        for client in self.clients:
            if isinstance(client, str):
                client = client_number(client, client_names)
            ids.append(client)
        largest_id = len(client_names) - 1
        if max(ids) > largest_id:
            raise ConfigurationError(
                f"{self!r} names client {max(ids)}, but the federation has clients 0 to {largest_id} only."
            )
        if len(set(ids)) < len(ids):
            raise ConfigurationError(
                f"{self!r} names a client twice, by its name and by its id. Name it once."
            )
        self._ids = ids


class FullParticipation(ClientSampler):
    """Sampler of all clients in every round.

    Example:
        >>> FullParticipation().sample(3, {}, torch.Generator())
        tensor([0, 1, 2])
    """

    def sample(
        self,
        num_clients: int,
        contributions: Contributions,
        generator: torch.Generator,
        round_index: int = 0,
    ) -> Tensor:
        return torch.arange(num_clients)

    def inclusion_probabilities(
        self,
        num_clients: int,
        contributions: Contributions,
        round_index: int = 0,
    ) -> Tensor:
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
        self,
        num_clients: int,
        contributions: Contributions,
        generator: torch.Generator,
        round_index: int = 0,
    ) -> Tensor:
        permutation = torch.randperm(num_clients, generator=generator)
        if self.members is not None:
            # All coalitions use the same permutation, of which each draws its first members.
            is_member = torch.isin(permutation, torch.tensor(self.members))
            permutation = permutation[is_member]
        return permutation[: self.cohort_size].sort().values

    def inclusion_probabilities(
        self,
        num_clients: int,
        contributions: Contributions,
        round_index: int = 0,
    ) -> Tensor:
        if self.members is None:
            return torch.full((num_clients,), self.cohort_size / num_clients)
        probabilities = torch.zeros(num_clients)
        probabilities[list(self.members)] = min(1.0, self.cohort_size / len(self.members))
        return probabilities

    def among(self, members: Sequence[int]) -> ClientSampler:
        sampler = copy(self)
        sampler.members = sorted(members)
        return sampler
