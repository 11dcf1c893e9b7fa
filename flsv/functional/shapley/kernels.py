"""Surrogate games whose Shapley value is known in closed form: kernels of |S n T|, |S| and |T|.

A kernel-ridge (Gaussian process) fit of a game is g(S) = sum_T a_T k(S, T) over the observed coalitions T. The Shapley
value is linear, so that of g is known as soon as those of the games S -> k(S, T) are. If k(S, T) = k(j, s, t) depends
on j = |S n T|, s = |S|, t = |T| only, the members of T are interchangeable in that game, and so are the others: it has
two values, and with s predecessors of which j in T (hypergeometric, since the predecessors of a player are a uniform
coalition of uniform size)

    inside(t)  = 1/n sum_{s=0..n-1} sum_j  C(t-1, j) C(n-t, s-j) / C(n-1, s)    [k(j+1, s+1, t) - k(j, s, t)]
    outside(t) = 1/n sum_{s=0..n-1} sum_j  C(t, j)   C(n-1-t, s-j) / C(n-1, s)  [k(j,   s+1, t) - k(j, s, t)].

This is exact for any such k, at a cost of n^2 per t and none of it coalition evaluations. Ridge regression on explicit
features is the special case where k is their inner product:

- membership z_i: k = j. The feature's own value is 1 for its player, 0 for the others.
- pairwise products z_i z_k: k = j (j - 1) / 2. The value is 1/2 for either of the two.
- membership / |S|, the linear term of a game whose coalitions *average* their members' updates: k = j / (s t). Player i
  gets z_i / |S| = 1 / (s + 1) on joining, and takes from it on later arrivals of others, so the feature of player i is
  worth  E[1/(s+1)] = H_n / n  to i (H_n the harmonic number), and by efficiency (1/n - H_n/n) / (n - 1) =
  -(H_n - 1) / (n (n - 1))  to every other player.

The Gaussian kernel goes further along the same line. A coalition's model is x + mean_{i in S} d_i, a function of the
weight vector c_S = z / |S|; coalitions with close c_S have close utilities, and
|c_S - c_T|^2 = 1/s + 1/t - 2 j / (s t). Its expansion contains all products of the averages, to every order.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

Kernel = Callable[[Tensor, Tensor, Tensor], Tensor]
"""``k(j, s, t)`` with j = |S n T|, s = |S|, t = |T|, float64 tensors that broadcast."""


def membership(j: Tensor, s: Tensor, t: Tensor) -> Tensor:
    """Inner product of membership vectors: additive games."""
    return j + 0 * s


def pairs(j: Tensor, s: Tensor, t: Tensor) -> Tensor:
    """Inner product of all products of two memberships: interactions of two players."""
    return j * (j - 1) / 2 + 0 * s


def averaged_membership(j: Tensor, s: Tensor, t: Tensor) -> Tensor:
    """Inner product of membership / size: games that are linear in the average of the members' updates."""
    return torch.where(s * t > 0, j / (s * t).clamp_min(1), 0.0)


def gaussian(squared_width: float) -> Kernel:
    """exp(-|c_S - c_T|^2 / (2 w)) of the weight vectors c_S = z / |S| (0 for the empty coalition)."""

    def kernel(j: Tensor, s: Tensor, t: Tensor) -> Tensor:
        own = torch.where(s > 0, 1 / s.clamp_min(1), 0.0) + torch.where(t > 0, 1 / t.clamp_min(1), 0.0)
        return torch.exp(-(own - 2 * averaged_membership(j, s, t)) / (2 * squared_width))

    return kernel


def gram(kernel: Kernel, left: Tensor, right: Tensor) -> Tensor:
    """``k(S, T)`` for all rows S of ``left`` (bool ``[A, n]``) and T of ``right`` (``[B, n]``): float64 ``[A, B]``."""
    left, right = left.to(torch.float64), right.to(torch.float64)
    return kernel(left @ right.T, left.sum(dim=1, keepdim=True), right.sum(dim=1))


def kernel_shapley(kernel: Kernel, coalitions: Tensor) -> Tensor:
    """Exact Shapley values of the games S -> k(S, T), for all rows T of ``coalitions`` (bool ``[B, n]``): ``[B, n]``.

    Example:
        The Shapley values of membership / |S| of player 0 among 3: H_3 / 3 and -(H_3 - 1) / 6.

        >>> kernel_shapley(averaged_membership, torch.tensor([[True, False, False]]))
        tensor([[ 0.6111, -0.1389, -0.1389]], dtype=torch.float64)
    """
    num_players = coalitions.shape[1]
    sizes = coalitions.sum(dim=1)
    inside, outside = torch.zeros(2, num_players + 1, dtype=torch.float64)
    s = torch.arange(num_players, dtype=torch.float64).view(-1, 1)
    for size in sizes.unique().tolist():
        t = torch.tensor(float(size), dtype=torch.float64)
        j = torch.arange(size + 1, dtype=torch.float64)
        here = kernel(j, s, t)
        if size < num_players:
            gain = kernel(j, s + 1, t) - here
            outside[size] = (_hypergeometric(num_players - 1, size, size) * gain).sum() / num_players
        if size > 0:
            gain = kernel(j + 1, s + 1, t) - here
            inside[size] = (_hypergeometric(num_players - 1, size - 1, size) * gain).sum() / num_players
    return torch.where(coalitions, inside[sizes].unsqueeze(1), outside[sizes].unsqueeze(1))


@lru_cache(maxsize=128)
def _hypergeometric(population: int, marked: int, most: int) -> Tensor:
    """Row s, column j: the probability of j marked ones among s drawn of ``population``, j up to ``most``."""
    drawn = torch.arange(population + 1, dtype=torch.float64).view(-1, 1)
    hits = torch.arange(most + 1, dtype=torch.float64)
    possible = (hits <= marked) & (hits <= drawn) & (drawn - hits <= population - marked)
    log_factorial = torch.lgamma(torch.arange(population + 1, dtype=torch.float64) + 1)

    def log_choose(n: int, k: Tensor) -> Tensor:
        k = k.clamp(0, n).long()
        return log_factorial[n] - log_factorial[k] - log_factorial[n - k]

    log_probability = (
        log_choose(marked, hits) + log_choose(population - marked, drawn - hits) - log_choose(population, drawn)
    )
    return torch.where(possible, log_probability.exp(), 0.0)
