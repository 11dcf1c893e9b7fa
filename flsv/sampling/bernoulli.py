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

#: How often a cohort is drawn again at most. Then its clients are drawn one by one, from the same distribution.
_DRAWS = 1000

#: The arguments are refused if a draw has ``min_cohort`` clients with a lower probability than this.
_RAREST = 1e-3


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
        ConfigurationError: ``expected_cohort`` is not positive or, before training, above the number of clients, or so
            small that hardly any draw has ``min_cohort`` clients, ``min_cohort`` is not 1 or 2.

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
        coin = min(1.0, self.expected_cohort / len(self.members))
        return torch.zeros(num_clients).index_fill(0, torch.tensor(self.members), coin)

    def among(self, members: Sequence[int]) -> ClientSampler:
        own = copy(self)
        own.members = sorted(members)
        own.min_cohort = 1 if len(members) == 1 else self.min_cohort
        return own

    def sample(
        self,
        num_clients: int,
        contributions: Contributions,
        generator: torch.Generator,
        round_index: int = 0,
    ) -> Tensor:
        coins = self.coins(num_clients, contributions)
        for _ in range(_DRAWS):
            drawn = (torch.rand(num_clients, generator=generator) < coins).nonzero().flatten()
            if len(drawn) >= self.min_cohort:
                return drawn
        return _draw_conditional(coins.tolist(), self.min_cohort, generator)

    def inclusion_probabilities(
        self, num_clients: int, contributions: Contributions, round_index: int = 0
    ) -> Tensor:
        coins = self.coins(num_clients, contributions)
        p = coins.double()
        valid = _probabilities(p.tolist(), self.min_cohort)[0][self.min_cohort]
        if self.min_cohort == 1:
            return (p / valid).to(coins)
        # The probability that another client takes part; in logarithms, since it may be tiny.
        absent, first = torch.log1p(-p), p.new_zeros(1)
        before, after = absent.cumsum(0), absent.flip(0).cumsum(0).flip(0)
        # Sums before and after each client: a coin of 1 has the logarithm -inf, which cannot be subtracted again.
        others_present = -torch.expm1(
            torch.cat([first, before[:-1]]) + torch.cat([after[1:], first])
        )
        return (p * others_present / valid).to(coins)

    def check(self, num_clients: int) -> None:
        if not self.min_cohort <= num_clients or self.expected_cohort > num_clients:
            raise ConfigurationError(
                f"{self!r} cannot be met: the federation has {num_clients} clients. Lower expected_cohort to at most "
                f"{num_clients} or make more clients in the partitioner."
            )
        valid = _probabilities([self.expected_cohort / num_clients] * num_clients, self.min_cohort)[
            0
        ][self.min_cohort]
        if valid < _RAREST:
            raise ConfigurationError(
                f"{self!r}: of {num_clients} clients, {self.min_cohort} would take part in {valid:.1g} of all draws "
                f"only. Raise expected_cohort, for example to {self.min_cohort}."
            )


def _probabilities(coins: Sequence[float], count: int) -> list[list[float]]:
    """Tabulate the probabilities of large cohorts, ``[n + 1][count + 1]``. Entry [i][c] is that of drawing at least c
    of the clients i, ..., n - 1.
    """
    table = [[1.0] + [0.0] * count]
    for coin in reversed(coins):
        later = table[-1]
        table.append(
            [1.0] + [coin * later[c - 1] + (1 - coin) * later[c] for c in range(1, count + 1)]
        )
    return table[::-1]


def _draw_conditional(coins: Sequence[float], count: int, generator: torch.Generator) -> Tensor:
    """Draw a cohort by a flip per client with probabilities ``coins``, conditional on at least ``count`` clients."""
    table, drawn, missing = _probabilities(coins, count), [], count
    for client, (coin, luck) in enumerate(
        zip(coins, torch.rand(len(coins), generator=generator).tolist())
    ):
        if luck * table[client][missing] < coin * table[client + 1][max(missing - 1, 0)]:
            drawn.append(client)
            missing = max(missing - 1, 0)
    return torch.tensor(drawn)
