"""Independent sampling: every client flips a coin of its own.

ShapleyFL (Sun et al., KDD 2023), Algorithm 1 (equal coins: AFedSV) and Algorithm 2 (importance sampling: AFedSV+).
"""

from __future__ import annotations

import torch
from torch import Tensor

from flsv.errors import ConfigurationError
from flsv.functional.shapley import importance_probabilities
from flsv.sampling.base import ClientSampler
from flsv.strategy import Contributions


class BernoulliSampler(ClientSampler):
    """Each client takes part with its own probability, independently; drawn again until ``min_cohort`` clients do.

    Drawing again makes everybody's chance a little larger than its coin's. ``inclusion_probabilities`` are those of the
    cohorts that are used, computed exactly, so dividing by them is unbiased; the paper divides by the coin's.

    Args:
        expected_cohort: m, the sum of the coins' probabilities; here they are all m/n.
        min_cohort: the least number of clients in a round, 1 or 2: a Shapley value needs two players.

    Raises:
        ConfigurationError: ``expected_cohort`` not positive or (before training) above the number of clients,
            ``min_cohort`` other than 1 or 2.

    Example:
        >>> sampler = BernoulliSampler(expected_cohort=2)
        >>> sampler.coins(4, {})
        tensor([0.5000, 0.5000, 0.5000, 0.5000])
        >>> sampler.inclusion_probabilities(4, {})
        tensor([0.6364, 0.6364, 0.6364, 0.6364])
    """

    def __init__(self, expected_cohort: float, min_cohort: int = 2) -> None:
        if expected_cohort <= 0:
            raise ConfigurationError(
                f"{type(self).__name__}(expected_cohort={expected_cohort}): expected a positive number of clients."
            )
        if min_cohort not in (1, 2):
            raise ConfigurationError(f"{type(self).__name__}(min_cohort={min_cohort}): expected 1 or 2.")
        self.expected_cohort, self.min_cohort = expected_cohort, min_cohort

    def coins(self, num_clients: int, contributions: Contributions) -> Tensor:
        """The probability ``[n]`` of each client's coin."""
        return torch.full((num_clients,), self.expected_cohort / num_clients)

    def sample(self, num_clients: int, contributions: Contributions, generator: torch.Generator) -> Tensor:
        coins = self.coins(num_clients, contributions)
        while True:
            drawn = (torch.rand(num_clients, generator=generator) < coins).nonzero().flatten()
            if len(drawn) >= self.min_cohort:
                return drawn

    def inclusion_probabilities(self, num_clients: int, contributions: Contributions) -> Tensor:
        coins = self.coins(num_clients, contributions)
        p = coins.double()
        # Of all the others: the probability that none of them takes part.
        none_else = torch.stack([(1 - torch.cat([p[:i], p[i + 1 :]])).prod() for i in range(num_clients)])
        none, one = (1 - p).prod(), (p * none_else).sum()
        if self.min_cohort == 1:
            return (p / (1 - none)).to(coins)
        return (p * (1 - none_else) / (1 - none - one)).to(coins)

    def check(self, num_clients: int) -> None:
        if not self.min_cohort <= num_clients or self.expected_cohort > num_clients:
            raise ConfigurationError(
                f"{self!r} cannot be met: the federation has {num_clients} clients. Lower expected_cohort to at most "
                f"{num_clients} or make more clients in the partitioner."
            )


class ShapleyImportanceSampler(BernoulliSampler):
    """Coins in proportion to the clients' Shapley weights, as far as probabilities may go (Theorem 5.1, AFedSV+).

    They minimise the variance of the aggregate over the cohort. Before the metric's first value all coins are equal.

    Args:
        expected_cohort: m, the expected number of clients per round.
        metric: the name of a metric ``[n]`` of non-negative weights, such as
            :class:`flsv.metrics.SurrogateFederatedShapley`. A client without a value counts as the mean of the others.
        min_cohort: the least number of clients in a round, 1 or 2.

    Example:
        >>> sampler = ShapleyImportanceSampler(expected_cohort=2, metric="ssv")
        >>> sampler.coins(4, {"ssv": torch.tensor([0.6, 0.1, 0.1, 0.2])})
        tensor([1.0000, 0.2500, 0.2500, 0.5000])
    """

    def __init__(self, expected_cohort: float, metric: str = "ssv", min_cohort: int = 2) -> None:
        super().__init__(expected_cohort, min_cohort)
        self.metric: str = metric

    def coins(self, num_clients: int, contributions: Contributions) -> Tensor:
        weights = contributions.get(self.metric)
        if weights is None:
            return super().coins(num_clients, contributions)
        weights = known_or_mean(weights.cpu()).clamp_min(0)
        coins = importance_probabilities(weights, self.expected_cohort)
        if int((coins > 0).sum()) < self.min_cohort:  # everybody else weighs nothing: no second player would ever come
            return super().coins(num_clients, contributions)
        return coins


def known_or_mean(values: Tensor) -> Tensor:
    """``values`` with the mean of the known ones in place of NaN; all ones if none is known."""
    known = ~values.isnan()
    mean = values[known].mean() if known.any() else torch.ones((), dtype=values.dtype, device=values.device)
    return torch.where(known, values, mean)
