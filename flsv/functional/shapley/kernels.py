r"""Kernels of coalitions, and the exact Shapley value of a game that is fitted with one.

A kernel-ridge (Gaussian process) fit of a game is g(S) = sum_T a_T k(S, T), with a sum over the evaluated coalitions T.
The Shapley value is linear, so that the value of g follows from the values of the games S -> k(S, T). Let
n be the number of players. If k(S, T) = k(j, s, t) depends only on j = |S n T|, s = |S| and t = |T|, all members of T
have the same value in the game S -> k(S, T), and so have all other players. The predecessors of a player in a random
order are a uniform coalition of uniform size s, and the number j of them in T is hypergeometric. The two values are

    inside(t)  = 1/n sum_{s=0..n-1} sum_j  C(t-1, j) C(n-t, s-j) / C(n-1, s)    [k(j+1, s+1, t) - k(j, s, t)]
    outside(t) = 1/n sum_{s=0..n-1} sum_j  C(t, j)   C(n-1-t, s-j) / C(n-1, s)  [k(j,   s+1, t) - k(j, s, t)]

with C(a, b) the binomial coefficient. They are exact for any such k, cost n^2 operations per t and need no evaluation
of a coalition. Ridge regression on explicit features is the special case in which k is the features' inner product.
Three sets of features of a coalition S, with z_i = 1 if player i is in S and otherwise 0:

- membership z_i: k = j. In the game z_i, player i has the value 1 and all others 0.
- pairwise products z_i z_l: k = j (j - 1) / 2. In the game z_i z_l, the players i and l have the value 1/2 each.
- membership / |S|, the linear term of a game whose coalitions *average* their members' updates: k = j / (s t). In the
  game z_i / |S|, player i contributes 1 / (s + 1) if it joins s others, and every later player reduces the utility.
  Player i has the value  E[1/(s+1)] = H_n / n  (H_n the harmonic number), and by efficiency every other player has
  (1/n - H_n/n) / (n - 1) = -(H_n - 1) / (n (n - 1)).

The Gaussian kernel corresponds to products of these averages of every order. A coalition's model is
x + mean_{i in S} d_i, with x the global model and d_i the clients' updates: a function of the weight vector
c_S = z / |S|. The kernel makes coalitions with close weight vectors have close utilities; their squared distance is
|c_S - c_T|^2 = 1/s + 1/t - 2 j / (s t).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

Kernel = Callable[[Tensor, Tensor, Tensor], Tensor]
"""A kernel ``k(j, s, t)`` of two coalitions S and T, with j = |S n T|, s = |S|, t = |T|, float64 tensors that
broadcast."""


def membership(j: Tensor, s: Tensor, t: Tensor) -> Tensor:
    """Compute the kernel of additive games: the inner product of two coalitions' membership vectors.

    Args:
        j: the number of players in both coalitions.
        s: the size of the first coalition.
        t: the size of the second coalition.
    """
    return j + 0 * s


def pairs(j: Tensor, s: Tensor, t: Tensor) -> Tensor:
    """Compute the kernel of games with interactions of two players: the number of pairs of players in both coalitions.

    Args:
        j: the number of players in both coalitions.
        s: the size of the first coalition.
        t: the size of the second coalition.
    """
    return j * (j - 1) / 2 + 0 * s


def averaged_membership(j: Tensor, s: Tensor, t: Tensor) -> Tensor:
    """Compute the kernel of games that are linear in the mean of the members' updates.

    It is the inner product of the two membership vectors, each divided by its coalition's size; 0 if a coalition is
    empty.

    Args:
        j: the number of players in both coalitions.
        s: the size of the first coalition.
        t: the size of the second coalition.
    """
    return torch.where(s * t > 0, j / (s * t).clamp_min(1), 0.0)


def gaussian(squared_width: float) -> Kernel:
    """Return the Gaussian kernel exp(-|c_S - c_T|^2 / (2 w)) of two coalitions S and T, with w = ``squared_width``.

    c_S is the membership vector of S divided by |S|, the weights with which S averages its members' updates; it is 0
    for the empty coalition.
    """

    def kernel(j: Tensor, s: Tensor, t: Tensor) -> Tensor:
        own = torch.where(s > 0, 1 / s.clamp_min(1), 0.0) + torch.where(t > 0, 1 / t.clamp_min(1), 0.0)
        return torch.exp(-(own - 2 * averaged_membership(j, s, t)) / (2 * squared_width))

    return kernel


def gram(kernel: Kernel, left: Tensor, right: Tensor) -> Tensor:
    """Compute a kernel's matrix between two lists of coalitions.

    Args:
        kernel: the kernel k.
        left: the coalitions S, bool ``[A, n]``.
        right: the coalitions T, bool ``[B, n]``.

    Returns:
        float64 ``[A, B]``, k(S, T) for each S and T.
    """
    left, right = left.to(torch.float64), right.to(torch.float64)
    return kernel(left @ right.T, left.sum(dim=1, keepdim=True), right.sum(dim=1))


def kernel_shapley(kernel: Kernel, coalitions: Tensor) -> Tensor:
    """Compute exact Shapley values of the games S -> k(S, T), one game for each coalition T.

    Args:
        kernel: the kernel k.
        coalitions: the coalitions T, bool ``[B, n]``.

    Returns:
        float64 ``[B, n]``, each player's value in each of the B games.

    Example:
        The game S -> [player 0 is in S] / |S| of three players.

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
    """Compute the probabilities of the hypergeometric distribution."""
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
