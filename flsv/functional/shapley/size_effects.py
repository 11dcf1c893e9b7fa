r"""Shapley values from all coalitions of some sizes: players' effects at the other sizes are interpolated.

Grouped by size s, the Shapley value of player i in the game U of n players N is a mean of differences (the formula of
:mod:`flsv.functional.shapley.stratified` with its two terms combined):

    SV_i = [ U(N) - U(empty) + sum_{s=1..n-1} D_i(s) ] / n,   D_i(s) = E[U(S) | i in S] - E[U(S) | i not in S], |S| = s.

If all coalitions of size s are evaluated, the difference D_i(s) is exact. For all other sizes,
:func:`size_effects_shapley` interpolates D_i linearly in log s. (A member's effect on an average falls with the number
of members, fast while they are few and slowly when they are many; a line over s itself would not follow this.) The
differences D_i(s) of all players sum to 0, hence so do the interpolated ones, and the values sum to U(N) - U(empty).

The method is this package's own. It assumes nothing about how players interact. The Gaussian process of
:mod:`flsv.functional.shapley.few_coalitions`, in contrast, models interactions. The two methods make different errors:
from ten players on, the mean of their values is closer to the values from all retrained coalitions than the values of
either (``docs/results/retrain.md``).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def size_effects(masks: Tensor, utilities: Tensor) -> dict[int, Tensor]:
    """Compute, for each coalition size, how much higher the mean utility is with each player than without it.

    Args:
        masks: K distinct coalitions, bool ``[K, n]``.
        utilities: the coalitions' utilities, float64 ``[K, M]``.

    Returns:
        ``{size: differences}`` for each size from 1 to n - 1 of which ``masks`` has all coalitions; the n players'
        differences are float64 ``[n, M]``.

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
    """Compute Shapley values from coalitions among which some sizes are complete.

    Each player's effects at the complete sizes, see :func:`size_effects`, are interpolated to the other sizes, linearly
    in the logarithm of the size.

    Args:
        masks: K distinct coalitions, bool ``[K, n]``, the empty and the grand coalition among them.
        utilities: the coalitions' utilities, float64 ``[K, M]``.

    Returns:
        float64 ``[n, M]``, whose sum over the players is the utility of the grand coalition minus that of the empty
        one; exact if all coalitions are given. None if a coalition of size 1 or n - 1 is missing, since effects are
        interpolated between these sizes.

    Example:
        A game of six players in which U(S) is the square root of the sum of the members' numbers, with 29 of its 64
        coalitions. The exact values are 0.00, 0.35, 0.58, 0.79, 0.99 and 1.18.

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
