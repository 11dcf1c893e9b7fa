"""UniformSampler: a cohort of fixed size, all equally likely."""

from __future__ import annotations

import torch
from torch import Tensor

from flsv.arguments import check_number
from flsv.errors import ConfigurationError
from flsv.sampling.base import ClientSampler
from flsv.strategy import Contributions


class UniformSampler(ClientSampler):
    """``cohort_size`` clients without replacement, as in FedAvg's Algorithm 1 (McMahan et al. 2017).

    Args:
        cohort_size: clients per round, at least 1.

    Raises:
        ConfigurationError: a cohort size below 1, or (before training) above the number of clients.

    Example:
        >>> UniformSampler(2).sample(5, {}, torch.Generator().manual_seed(0)).shape
        torch.Size([2])
    """

    def __init__(self, cohort_size: int) -> None:
        check_number(self, "cohort_size", cohort_size, least=1, whole=True)
        self.cohort_size = cohort_size

    def sample(
        self, num_clients: int, contributions: Contributions, generator: torch.Generator, round_index: int = 0
    ) -> Tensor:
        return torch.randperm(num_clients, generator=generator)[: self.cohort_size].sort().values

    def inclusion_probabilities(self, num_clients: int, contributions: Contributions, round_index: int = 0) -> Tensor:
        return torch.full((num_clients,), self.cohort_size / num_clients)

    def check(self, num_clients: int) -> None:
        if self.cohort_size > num_clients:
            raise ConfigurationError(
                f"UniformSampler(cohort_size={self.cohort_size}) cannot be met: the federation has {num_clients} "
                f"clients. Lower cohort_size to {num_clients} or make more clients in the partitioner."
            )
