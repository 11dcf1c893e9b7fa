"""Inputs and outputs of all estimators: the coalition game as a batched callable, and ShapleyEstimate.

The Shapley value (Shapley 1953; ShapleyFL, KDD 2023, eq. 1) of player i in the game U on n players is

    SV_i = 1/n sum_{S not containing i} [U(S + i) - U(S)] / binom(n - 1, |S|).

Every function of this package is pure mathematics on a callable ``utility(masks: bool [K, n]) -> float [K]`` (or
``[K, M]``, one game per column, such as the accuracy of each class) and knows nothing of models or rounds.

Arithmetic is float64 on the CPU; results come back in the utility's own dtype if that is float32 or float64, and in
float32 otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from scipy import stats
from torch import Tensor

Utility = Callable[[Tensor], Tensor]
"""``masks: bool [K, n] -> float [K]`` or ``[K, M]``; row k says which of the n players are in coalition k.

The masks are on the CPU and distinct; the answer may be on any device. It is read without gradients.
"""


@dataclass(frozen=True, eq=False)
class ShapleyEstimate:
    """Values of all players, their standard errors, and the number of evaluations.

    Attributes:
        values: ``[n]``, or ``[n, M]`` for a vector-valued utility, in the utility's unit.
        stderr: standard error of ``values`` due to sampling, same shape and unit: 0 where every coalition that matters
            was evaluated, NaN where fewer than two samples say nothing about the spread. It does not contain the bias
            of truncation or of a fitted surrogate; the estimators that have one say so.
        evaluations: number of distinct coalitions that this call asked the utility for, the empty one and the grand
            one included.
        freedom: of how many degrees of freedom ``stderr`` is, for intervals by Student's t; inf, for normal ones, where
            the estimator does not tell. A tensor of the shape of ``stderr``, or one number for all.

    Example:
        Three pairs of orders, and so an interval half as wide again as a normal one.

        >>> import torch
        >>> from flsv.functional import permutation_shapley
        >>> airport = lambda masks: -(masks * torch.arange(6.0)).amax(dim=1)
        >>> found = permutation_shapley(airport, 6, num_permutations=6, generator=torch.Generator().manual_seed(0))
        >>> found.freedom, t_quantile(0.9, found.freedom) / t_quantile(0.9)
        (2, tensor(1.7752, dtype=torch.float64))
    """

    values: Tensor
    stderr: Tensor
    evaluations: int
    freedom: Tensor | float = field(default=math.inf, kw_only=True)


def t_quantile(level: float, freedom: Tensor | float = math.inf) -> Tensor:
    """Half the width of an interval at this level, in standard errors of that many degrees of freedom: float64."""
    told = torch.as_tensor(freedom, dtype=torch.float64, device="cpu")
    return torch.as_tensor(stats.t.ppf((1 + level) / 2, told.numpy()), dtype=torch.float64)
