"""Samplers that go by what the clients contribute, and independent sampling.

ShapleyFL (Sun et al., KDD 2023), Algorithm 1 (equal coins: AFedSV) and Algorithm 2 (importance sampling: AFedSV+);
S-FedAvg (Nagalapatti and Narayanam, "Game of Gradients: Mitigating Irrelevant Clients in Federated Learning", AAAI
2021, Algorithm 1): relevant clients are drawn more often.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

import torch
from annotated_types import Ge
from torch import Tensor

from flsv.core.strategy import Contributions
from flsv.functional import importance_probabilities
from flsv.sampling.base import ClientSampler
from flsv.utilities.declared import Count, Positive
from flsv.utilities.errors import ConfigurationError


class BernoulliSampler(ClientSampler):
    """Each client takes part with its own probability, independently; drawn again until ``min_cohort`` clients do.

    Drawing again makes everybody's chance a little larger than its coin's. ``inclusion_probabilities`` are those of the
    cohorts that are used, computed exactly, so dividing by them is unbiased; the paper divides by the coin's.

    Args:
        expected_cohort: m, the sum of the coins' probabilities; here they are all m/n.
        min_cohort: the least number of clients in a round, 1 or 2: a Shapley value needs two players.

    Raises:
        ConfigurationError: ``expected_cohort`` not positive or (before training) above the number of clients, or so
            small that hardly any draw has ``min_cohort`` clients; ``min_cohort`` other than 1 or 2.

    Example:
        >>> sampler = BernoulliSampler(expected_cohort=2)
        >>> sampler.coins(4, {})
        tensor([0.5000, 0.5000, 0.5000, 0.5000])
        >>> sampler.inclusion_probabilities(4, {})
        tensor([0.6364, 0.6364, 0.6364, 0.6364])
    """

    def __init__(self, expected_cohort: Positive, min_cohort: Literal[1, 2] = 2) -> None:
        self.expected_cohort = expected_cohort
        self.min_cohort = min_cohort

    def coins(self, num_clients: int, contributions: Contributions) -> Tensor:
        """The probability ``[n]`` of each client's coin."""
        return torch.full((num_clients,), self.expected_cohort / num_clients)

    def sample(
        self, num_clients: int, contributions: Contributions, generator: torch.Generator, round_index: int = 0
    ) -> Tensor:
        coins = self.coins(num_clients, contributions)
        for _ in range(_DRAWS):
            drawn = (torch.rand(num_clients, generator=generator) < coins).nonzero().flatten()
            if len(drawn) >= self.min_cohort:
                return drawn
        return _conditional(coins.tolist(), self.min_cohort, generator)

    def inclusion_probabilities(self, num_clients: int, contributions: Contributions, round_index: int = 0) -> Tensor:
        coins = self.coins(num_clients, contributions)
        p = coins.double()
        valid = _at_least(p.tolist(), self.min_cohort)[0][self.min_cohort]
        if self.min_cohort == 1:
            return (p / valid).to(coins)
        # The probability that somebody else takes part; in logarithms, since it may be next to nothing.
        absent, first = torch.log1p(-p), p.new_zeros(1)
        before, after = absent.cumsum(0), absent.flip(0).cumsum(0).flip(0)
        # Not the sum of all less one's own: a coin of 1 is minus infinity, which no subtraction takes out again.
        someone_else = -torch.expm1(torch.cat([first, before[:-1]]) + torch.cat([after[1:], first]))
        return (p * someone_else / valid).to(coins)

    def check(self, num_clients: int) -> None:
        if not self.min_cohort <= num_clients or self.expected_cohort > num_clients:
            raise ConfigurationError(
                f"{self!r} cannot be met: the federation has {num_clients} clients. Lower expected_cohort to at most "
                f"{num_clients} or make more clients in the partitioner."
            )
        valid = _at_least([self.expected_cohort / num_clients] * num_clients, self.min_cohort)[0][self.min_cohort]
        if valid < _RAREST:
            raise ConfigurationError(
                f"{self!r}: of {num_clients} clients, {self.min_cohort} would take part in {valid:.1g} of all draws "
                f"only. Raise expected_cohort, for example to {self.min_cohort}."
            )


class ShapleyImportanceSampler(BernoulliSampler):
    """Independent inclusion with probabilities in proportion to the clients' Shapley weights, as far as probabilities
    allow (Theorem 5.1, AFedSV+).

    They minimize the variance of the aggregate over the cohort. Before the metric's first value all coins are equal.

    Args:
        expected_cohort: m, the expected number of clients per round.
        metric: the name of a metric ``[n]`` of non-negative weights, such as
            :class:`flsv.metrics.SurrogateFederatedShapley`. A client never seen counts as the metric's ``prior`` or,
            without one, as the mean of the others.
        min_cohort: the least number of clients in a round, 1 or 2.

    Example:
        >>> sampler = ShapleyImportanceSampler(expected_cohort=2, metric="ssv")
        >>> sampler.coins(4, {"ssv": torch.tensor([0.6, 0.1, 0.1, 0.2])})
        tensor([1.0000, 0.2500, 0.2500, 0.5000])
    """

    metric_shape = ("n",)

    def __init__(self, expected_cohort: Positive, metric: str = "ssv", min_cohort: Literal[1, 2] = 2) -> None:
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


#: A cohort is drawn so often before its clients are drawn one by one, which gives the same distribution.
_DRAWS = 1000
#: A federation whose draws are this seldom large enough is not meant.
_RAREST = 1e-3


def _at_least(coins: Sequence[float], count: int) -> list[list[float]]:
    """``[n + 1][count + 1]``, entry i, c: the probability that at least c of the clients i, i+1, ... take part.

    Sums of products only: exact also where it is next to nothing.
    """
    table = [[1.0] + [0.0] * count]
    for coin in reversed(coins):
        later = table[-1]
        table.append([1.0] + [coin * later[c - 1] + (1 - coin) * later[c] for c in range(1, count + 1)])
    return table[::-1]


def _conditional(coins: Sequence[float], count: int, generator: torch.Generator) -> Tensor:
    """Clients whose coins fell on heads, given that at least ``count`` did: drawn one by one."""
    table, drawn, missing = _at_least(coins, count), [], count
    for client, (coin, luck) in enumerate(zip(coins, torch.rand(len(coins), generator=generator).tolist())):
        if luck * table[client][missing] < coin * table[client + 1][max(missing - 1, 0)]:
            drawn.append(client)
            missing = max(missing - 1, 0)
    return torch.tensor(drawn)


#: Chances are worked out in float32.
_ROUNDING = 1e-6


class SystematicShapleySampler(ShapleyImportanceSampler):
    """Inclusion probabilities in proportion to the clients' Shapley weights, as in AFedSV+, with exactly
    ``cohort_size`` clients.

    The paper's coins are independent (:class:`ShapleyImportanceSampler`): one cohort has two clients and another has
    twelve, and the sums of their weights differ as much. Here clients lie in random order on a line, each as long as
    its chance, and points at distances of 1 pick those that they fall on. Everybody's chance is its coin's, so that
    dividing by it stays unbiased (Theorem 5.1 needs no more); where no chance has reached 1, the weights ``w_i / p_i``
    are all 1 / ``cohort_size`` and sum to 1. Not in the paper.

    Args:
        cohort_size: m, clients per round; at least 2.
        metric: as of :class:`ShapleyImportanceSampler`.

    Raises:
        ConfigurationError: ``cohort_size`` below 2 or (before training) above the number of clients.

    Example:
        >>> sampler = SystematicShapleySampler(cohort_size=2, metric="ssv")
        >>> contributions = {"ssv": torch.tensor([0.6, 0.1, 0.1, 0.2])}
        >>> sampler.inclusion_probabilities(4, contributions)
        tensor([1.0000, 0.2500, 0.2500, 0.5000])
        >>> sampler.sample(4, contributions, torch.Generator().manual_seed(0))
        tensor([0, 1])
    """

    def __init__(self, cohort_size: Annotated[int, Ge(2)], metric: str = "ssv") -> None:
        super().__init__(cohort_size, metric)
        self.cohort_size = cohort_size

    def sample(
        self, num_clients: int, contributions: Contributions, generator: torch.Generator, round_index: int = 0
    ) -> Tensor:
        coins = self.coins(num_clients, contributions).double()
        sure = coins > 1 - _ROUNDING
        order = torch.randperm(num_clients, generator=generator)
        order = order[~sure[order]]
        points = torch.rand((), generator=generator, dtype=torch.float64) + torch.arange(
            self.cohort_size - int(sure.sum())
        )
        ends = coins[order].cumsum(0)
        # The line is as long as there are points, but for rounding, which must not lose the last one.
        picked = torch.searchsorted(ends * (len(points) / ends[-1]) if len(ends) else ends, points, right=True)
        return torch.cat([sure.nonzero().flatten(), order[picked]]).sort().values

    def inclusion_probabilities(self, num_clients: int, contributions: Contributions, round_index: int = 0) -> Tensor:
        return self.coins(num_clients, contributions)


class SoftmaxSampler(ClientSampler):
    """``cohort_size`` clients without replacement, one after the other with chances softmax(relevance / temperature).

    Args:
        cohort_size: clients per round.
        metric: the name of a metric ``[n]``, the clients' relevance. Without a value, all are equally likely; a client
            never seen counts as the metric's ``prior`` or, without one, as the mean of the others.
        temperature: what the relevance is divided by. The paper's, and the default, is 1: Shapley values of an
            accuracy, a few hundredths, then hardly matter. At 0.1 a hundredth is 10 % in the chances.

    Raises:
        ConfigurationError: a cohort size below 1 or above the number of clients, a temperature that is not positive.

    Example:
        >>> SoftmaxSampler(2, metric="sv").sample(5, {}, torch.Generator().manual_seed(0)).shape
        torch.Size([2])
    """

    metric_shape = ("n",)

    def __init__(self, cohort_size: Count, metric: str = "sv", temperature: Positive = 1.0) -> None:
        self.cohort_size = cohort_size
        self.temperature = temperature
        self.metric: str = metric

    def chances(self, num_clients: int, contributions: Contributions) -> Tensor:
        """The probability ``[n]`` of each client to be drawn first."""
        relevance = contributions.get(self.metric)
        relevance = torch.zeros(num_clients) if relevance is None else known_or_mean(relevance.cpu())
        return (relevance.double() / self.temperature).softmax(0)

    def sample(
        self, num_clients: int, contributions: Contributions, generator: torch.Generator, round_index: int = 0
    ) -> Tensor:
        chances = self.chances(num_clients, contributions)
        return chances.multinomial(self.cohort_size, generator=generator).sort().values

    def inclusion_probabilities(self, num_clients: int, contributions: Contributions, round_index: int = 0) -> Tensor:
        """Estimated from 4096 draws: successive sampling without replacement has no closed form."""
        chances = self.chances(num_clients, contributions)
        draws = chances.expand(4096, -1).multinomial(self.cohort_size, generator=torch.Generator().manual_seed(0))
        return torch.bincount(draws.flatten(), minlength=num_clients).float() / len(draws)
