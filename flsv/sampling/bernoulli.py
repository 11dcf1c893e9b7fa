"""BernoulliSampler: independent inclusion of each client.

Sun et al., "ShapleyFL: Robust Federated Learning Based on Shapley Value", KDD 2023, Algorithm 1 (AFedSV).
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import Literal

import torch
from torch import Tensor

from flsv.core.strategy import Contributions
from flsv.sampling.base import ClientSampler
from flsv.utilities.declared import Positive
from flsv.utilities.errors import ConfigurationError

#: Largest number of repeated draws. After these, clients are drawn one by one from the same distribution.
_MAX_DRAWS = 1000

#: Smallest allowed probability that a draw has ``min_cohort`` clients.
_MIN_SHARE_OF_DRAWS = 1e-3


class BernoulliSampler(ClientSampler):
    """Sampler that includes each client independently, by a coin flip. It repeats all flips until the cohort has at
    least ``min_cohort`` clients.

    The repetition makes a client's inclusion probability a little larger than its coin's probability.
    ``inclusion_probabilities`` returns the exact probabilities, so that dividing by them is unbiased. The paper divides
    by the coin's probability.

    Args:
        expected_cohort: m, the sum of the n coins' probabilities, which are all m/n.
        min_cohort: the least number of clients in a round, 1 or 2: a Shapley value needs two players.

    Raises:
        ConfigurationError: ``min_cohort`` is not 1 or 2, or ``expected_cohort`` is not positive or, before training,
            above the number of clients or so small that hardly any draw has ``min_cohort`` clients.

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
        """Compute each client's probability to be drawn by one coin flip, ``[n]``."""
        if self.members is None:
            return torch.full((num_clients,), self.expected_cohort / num_clients)
        probabilities = torch.zeros(num_clients)
        probabilities[list(self.members)] = min(1.0, self.expected_cohort / len(self.members))
        return probabilities

    def among(self, members: Sequence[int]) -> ClientSampler:
        sampler = copy(self)
        sampler.members = sorted(members)
        if len(members) == 1:
            sampler.min_cohort = 1
        return sampler

    def sample(
        self,
        num_clients: int,
        contributions: Contributions,
        generator: torch.Generator,
        round_index: int = 0,
    ) -> Tensor:
        probabilities = self.coins(num_clients, contributions)
        for _ in range(_MAX_DRAWS):
            takes_part = torch.rand(num_clients, generator=generator) < probabilities
            cohort = takes_part.nonzero().flatten()
            if len(cohort) >= self.min_cohort:
                return cohort
        return _draw_conditional(probabilities.tolist(), self.min_cohort, generator)

    def inclusion_probabilities(
        self,
        num_clients: int,
        contributions: Contributions,
        round_index: int = 0,
    ) -> Tensor:
        probabilities = self.coins(num_clients, contributions)
        p = probabilities.double()
        p_enough_drawn = _probability_of_at_least(self.min_cohort, p.tolist())  # a number
        if self.min_cohort == 1:  # otherwise it is 2
            return (p / p_enough_drawn).to(probabilities)

        # A cohort of at least 2 has client i if i and another client are drawn: p_i p_another_i / p_enough_drawn, with
        #   p_another_i = 1 - prod_{j != i} (1 - p_j) = -expm1(sum_{j < i} log(1 - p_j) + sum_{j > i} log(1 - p_j)).
        # (The sum of all terms minus term i would be NaN for p_i = 1.)
        log_absent = torch.log1p(-p)
        sums_before = _sums_before(log_absent)
        sums_after = _sums_before(log_absent.flip(0)).flip(0)
        p_another_drawn = -torch.expm1(sums_before + sums_after)
        return (p * p_another_drawn / p_enough_drawn).to(probabilities)

    def check(self, client_names: Sequence[str]) -> None:
        num_clients = len(client_names)
        if max(self.min_cohort, self.expected_cohort) > num_clients:
            raise ConfigurationError(
                f"{self!r} cannot draw its cohort, since the federation has {num_clients} clients. Lower "
                f"expected_cohort to at most {num_clients}, or set more clients in the partitioner."
            )
        probabilities = [self.expected_cohort / num_clients] * num_clients
        p_large_enough = _probability_of_at_least(self.min_cohort, probabilities)
        if p_large_enough < _MIN_SHARE_OF_DRAWS:
            raise ConfigurationError(
                f"{self!r} would draw at least {self.min_cohort} of {num_clients} clients with a probability of only "
                f"{p_large_enough:.1g}. Raise expected_cohort, for example to {self.min_cohort}."
            )


def _sums_before(numbers: Tensor) -> Tensor:
    """Return the sum of all numbers before each one."""
    zero = numbers.new_zeros(1)
    return torch.cat([zero, numbers[:-1]]).cumsum(0)


def _probability_of_at_least(count: int, probabilities: Sequence[float]) -> float:
    table = _tail_probabilities(probabilities, count)
    return table[0][count]


def _tail_probabilities(probabilities: Sequence[float], count: int) -> list[list[float]]:
    """Tabulate the probabilities ``[n + 1][count + 1]`` of at least c of the clients i, ..., n - 1."""
    # The table is built from its last row, for no clients, of which at least 0 are always drawn.
    no_clients = [1.0] + [0.0] * count
    table = [no_clients]
    for probability in reversed(probabilities):
        of_later_clients = table[-1]
        row = [1.0]
        for num_drawn in range(1, count + 1):
            p_with_client = probability * of_later_clients[num_drawn - 1]
            p_without_client = (1 - probability) * of_later_clients[num_drawn]
            row.append(p_with_client + p_without_client)
        table.append(row)
    return table[::-1]


def _draw_conditional(
    probabilities: Sequence[float],
    count: int,
    generator: torch.Generator,
) -> Tensor:
    """Draw a cohort by a flip per client with ``probabilities``, conditional on at least ``count`` clients."""
    # table[i][c] is the probability that at least c of the clients from i on take part.
    table = _tail_probabilities(probabilities, count)
    uniform_draws = torch.rand(len(probabilities), generator=generator).tolist()
    cohort = []
    num_missing = count
    for client, probability in enumerate(probabilities):
        num_missing_with_client = max(num_missing - 1, 0)
        p_enough = table[client][num_missing]
        p_drawn_and_enough = probability * table[client + 1][num_missing_with_client]
        # The client takes part with the conditional probability, the ratio of the two.
        if uniform_draws[client] * p_enough < p_drawn_and_enough:
            cohort.append(client)
            num_missing = num_missing_with_client
    return torch.tensor(cohort)
