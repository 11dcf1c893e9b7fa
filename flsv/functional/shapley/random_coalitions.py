"""Random orders of the players and random coalitions, drawn in batches.

An order is obtained by sorting uniform float64 numbers, one per player. Ties would favor the players with low indices;
their probability is below 1e-10 for a thousand players.
"""

from __future__ import annotations

import torch
from torch import Generator, Tensor


def random_permutations(count: int, num_players: int, generator: Generator | None = None) -> Tensor:
    """Draw ``count`` independent uniform orders of the n players, int ``[count, n]``."""
    return torch.rand(count, num_players, generator=generator, dtype=torch.float64).argsort(dim=1)


def random_coalitions(sizes: Tensor, num_players: int, generator: Generator | None = None) -> Tensor:
    """Draw K independent coalitions of given sizes, each uniformly among all coalitions of its size.

    Args:
        sizes: int ``[K]``, the coalitions' sizes, from 0 to n.
        num_players: the number n of players.
        generator: the random generator of the draws; None: torch's default.

    Returns:
        bool ``[K, n]``.

    Example:
        >>> random_coalitions(torch.tensor([0, 2, 3]), 3).sum(dim=1).tolist()
        [0, 2, 3]
    """
    ranks = random_permutations(len(sizes), num_players, generator).argsort(dim=1)
    return ranks < sizes[:, None]


def prefixes(permutations: Tensor) -> Tensor:
    """List the coalitions that each order passes through: its first player, its first two, ..., its first n - 1.

    Args:
        permutations: P orders of the n players, int ``[P, n]``.

    Returns:
        bool ``[P, n-1, n]``.

    Example:
        >>> prefixes(torch.tensor([[2, 0, 1]])).int().tolist()
        [[[0, 0, 1], [1, 0, 1]]]
    """
    ranks = permutations.argsort(dim=1)
    return ranks[:, None, :] < torch.arange(1, permutations.shape[1])[:, None]
