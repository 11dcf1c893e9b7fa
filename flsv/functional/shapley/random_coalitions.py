"""Random orders of the players and random coalitions, in batches from one generator.

Orders are the ranks of float64 uniform numbers: ties, which would favor the players with low numbers, have probability
below 1e-12 for a thousand players.
"""

from __future__ import annotations

import torch
from torch import Generator, Tensor


def random_permutations(count: int, num_players: int, generator: Generator | None = None) -> Tensor:
    """Draw ``count`` independent uniform orders of the players, int ``[count, n]``."""
    return torch.rand(count, num_players, generator=generator, dtype=torch.float64).argsort(dim=1)


def random_coalitions(sizes: Tensor, num_players: int, generator: Generator | None = None) -> Tensor:
    """Draw independent coalitions, the k-th uniform among those of size ``sizes[k]``.

    Args:
        sizes: int ``[K]``, from 0 to n.
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
    """List the coalitions along orders, without the empty and the grand one.

    Args:
        permutations: int ``[P, n]``.

    Returns:
        bool ``[P, n-1, n]``.

    Example:
        >>> prefixes(torch.tensor([[2, 0, 1]])).int().tolist()
        [[[0, 0, 1], [1, 0, 1]]]
    """
    ranks = permutations.argsort(dim=1)
    return ranks[:, None, :] < torch.arange(1, permutations.shape[1])[:, None]
