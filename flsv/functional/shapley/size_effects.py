r"""Shapley values from coalitions of some sizes only: what a player does to the mean utility, as a curve over the size.

Sorted by size, the Shapley value is a mean of differences (``stratified`` has the same formula with its two terms
apart):

    SV_i = [ U(N) - U(empty) + sum_{s=1..n-1} D_i(s) ] / n,   D_i(s) = E[U(S) | i in S] - E[U(S) | i not in S], |S| = s.

A design of few coalitions knows D_i at some sizes exactly: of each player alone (s = 1), of pairs (2) and of all but
one (n - 1). Between these, ``size_effects_shapley`` draws a straight line over log s. What a member does to an average
falls with the number of those it is averaged with, fast while they are few and slowly when they are many, which a line
over s itself misses. The D_i(s) of all players sum to 0, so do the lines, and the values to U(N) - U(empty).

This is no paper's method. Nothing is fitted and nothing is assumed of how players combine; the Gaussian process of
``few_coalitions`` knows interactions, and has to make up the sizes between. The errors of the two differ, and their
mean is closer to retraining every coalition than either from ten players on (``docs/results/retrain.md``).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def size_effects(masks: Tensor, utilities: Tensor) -> dict[int, Tensor]:
    """Compute how much higher the mean utility is with each player than without it, at each size that is complete.

    Args:
        masks: bool ``[K, n]``, distinct coalitions.
        utilities: float64 ``[K, M]``.

    Returns:
        Size, from 1 to n - 1, to float64 ``[n, M]``. A size of which a coalition is missing is left out.

    Example:
        >>> masks = torch.eye(3, dtype=torch.bool)
        >>> size_effects(masks, torch.tensor([[1.0], [2.0], [6.0]]).double())[1].flatten()
        tensor([-3.0000, -1.5000,  4.5000], dtype=torch.float64)
    """
    n, sizes = masks.shape[1], masks.sum(1)
    found = {}
    for size in range(1, n):
        rows = sizes == size
        if int(rows.sum()) == math.comb(n, size):
            members, of_size = masks[rows].double(), utilities[rows]
            inside = members.T @ of_size / members.sum(0)[:, None]
            found[size] = inside - (1 - members).T @ of_size / (1 - members).sum(0)[:, None]
    return found


def size_effects_shapley(masks: Tensor, utilities: Tensor) -> Tensor | None:
    """Compute Shapley values whose effects at sizes that were not evaluated lie on lines over the size's logarithm.

    Args:
        masks: bool ``[K, n]``, distinct, with the empty and the grand coalition.
        utilities: float64 ``[K, M]``.

    Returns:
        float64 ``[n, M]``, whose sum over the players is U(N) - U(empty); exact where all coalitions are there. None
        where those of one player or those of all but one are not complete: a line has no end there.

    Example:
        A game that is the root of what its members have together, by 29 of its 64 coalitions; the exact values are
        0.00, 0.35, 0.58, 0.79, 0.99 and 1.18.

        >>> from flsv.functional import few_coalitions
        >>> masks = few_coalitions(6, "pairs+leave-one-out")
        >>> together = masks.double() @ torch.arange(6.0).double()
        >>> size_effects_shapley(masks, together[:, None].sqrt()).flatten().round(decimals=2)
        tensor([-0.0100,  0.3400,  0.5800,  0.7900,  0.9900,  1.1800],
               dtype=torch.float64)
    """
    n, sizes = masks.shape[1], masks.sum(1)
    effects = size_effects(masks, utilities)
    known = sorted(effects)
    if n > 1 and (1 not in effects or n - 1 not in effects):
        return None
    total = utilities[sizes == n][0] - utilities[sizes == 0][0]
    values = total.expand(n, -1).clone()
    for size in range(1, n):
        below, above = (pick(k for k in known if of(k)) for pick, of in ((max, size.__ge__), (min, size.__le__)))
        place = 0.0 if below == above else math.log(size / below) / math.log(above / below)
        values += torch.lerp(effects[below], effects[above], place)
    return values / n
