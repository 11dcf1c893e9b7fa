"""Conditions under which the benchmark repeats a run: absence, noise, another aggregator."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flsv.aggregation import FedAvg, GeometricMedian
from flsv.benchmark.federation import Federation
from flsv.errors import ConfigurationError
from flsv.privacy import GaussianPrivacy
from flsv.sampling import ClientSampler, UniformSampler
from flsv.strategy import Contributions

#: Name to what it is, in words.
CONDITIONS = {
    "base": "everybody takes part in every round, FedAvg",
    "partial": "two clients of a round's are absent, drawn anew every round",
    "dropout": "the most valuable client is gone after half of the rounds",
    "private": "updates are clipped to length 1 and get noise of standard deviation 0.01 an entry",
    "uniform": "the clients' models are averaged with equal weights",
    "median": "the geometric median of the clients' models",
}
AGGREGATORS = ("uniform", "median")


class Dropout(ClientSampler):
    """All clients take part, but one leaves after a given round.

    Args:
        client: who.
        after: rounds in which it takes part.

    Example:
        >>> Dropout(0, after=5).sample(3, {}, torch.Generator(), round_index=5)
        tensor([1, 2])
    """

    def __init__(self, client: int, after: int) -> None:
        self.client, self.after = client, after

    def sample(
        self, num_clients: int, contributions: Contributions, generator: torch.Generator, round_index: int = 0
    ) -> Tensor:
        return self.inclusion_probabilities(num_clients, contributions, round_index).nonzero().flatten()

    def inclusion_probabilities(self, num_clients: int, contributions: Contributions, round_index: int = 0) -> Tensor:
        chances = torch.ones(num_clients)
        if round_index >= self.after:
            chances[self.client] = 0
        return chances

    def check(self, num_clients: int) -> None:
        if not 0 <= self.client < num_clients or num_clients < 2:
            raise ConfigurationError(f"Dropout(client={self.client}): there are {num_clients} clients.")


def arguments(condition: str, federation: Federation, best: int) -> dict[str, Any]:
    """Arguments of :class:`flsv.FederatedLoop`.

    Args:
        condition: a name in :data:`CONDITIONS`.
        federation: where.
        best: the client of the largest true value.

    Raises:
        ConfigurationError: there is no such condition.
    """
    clients = len(federation.num_samples)
    if condition == "partial":
        return {"sampler": UniformSampler(cohort_size=max(2, clients - 2))}
    if condition == "dropout":
        return {"sampler": Dropout(best, federation.rounds // 2)}
    if condition == "private":
        return {"uploads": [GaussianPrivacy(clip=1.0, noise_multiplier=0.01)]}
    if condition == "uniform":
        return {"aggregator": FedAvg(weighting="uniform")}
    if condition == "median":
        return {"aggregator": GeometricMedian()}
    if condition != "base":
        raise ConfigurationError(f"there is no condition {condition!r}: expected one of {list(CONDITIONS)}.")
    return {}
