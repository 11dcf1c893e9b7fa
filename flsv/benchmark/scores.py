"""How near clients' values are to the truth, how well they find bad clients, and how certain a mean is."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

import numpy as np
import torch
from scipy import stats
from torch import Tensor
from torchmetrics.functional.classification import binary_auroc

NAN = float("nan")
_Number = TypeVar("_Number", float, Tensor)


def mean(values: Iterable[float]) -> float:
    """Of those that are known (not NaN); NaN of none.

    Example:
        >>> mean([1.0, NAN, 2.0])
        1.5
    """
    known = [value for value in values if value == value]
    return float(np.mean(known)) if known else NAN


def half_width(spread: _Number, count: int, level: float = 0.9) -> _Number:
    """Half the width of a mean's interval, by Student's t over so many values; NaN of one.

    Args:
        spread: their standard deviation.
        count: how many there are.
        level: of the interval.

    Example:
        >>> round(half_width(1.0, 4), 3)
        1.177
    """
    return (float(stats.t.ppf((1 + level) / 2, count - 1)) if count > 1 else NAN) * spread / count**0.5


def spearman(values: Tensor, truth: Tensor) -> float:
    """Rank correlation, ties at their mean rank; 0 where all values are equal, since they say nothing.

    Args:
        values: ``[n]``, what is judged. Clients without a value (NaN) are ranked last, together.
        truth: ``[n]``.

    Example:
        >>> round(spearman(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([0.1, 0.2, 9.0])), 6)
        1.0
    """
    return pearson(_ranks(values), _ranks(truth))


def pearson(values: Tensor, truth: Tensor) -> float:
    """Correlation; 0 where all values are equal. Clients without a value count as the least of the others.

    Example:
        >>> round(pearson(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([1.0, 2.0, 4.0])), 3)
        0.982
    """
    centred = []
    for each in (_filled(values), _filled(truth)):
        deviation = each - each.mean()
        if deviation.norm() <= 1e-12 * each.norm():  # all equal, to rounding
            return 0.0
        centred.append(deviation / deviation.norm())
    return float((centred[0] @ centred[1]).clamp(-1, 1))


def share_error(values: Tensor, truth: Tensor) -> float:
    """Half the sum of the differences of shares: how much of what is paid out goes to others than it ought to, 0 to 1.

    Shares are the values above 0, made to sum to 1; equal where nobody has one.

    Example:
        >>> share_error(torch.tensor([1.0, 1.0, -3.0]), torch.tensor([3.0, 1.0, 0.0]))
        0.25
    """
    return float((shares(values) - shares(truth)).abs().sum() / 2)


def shares(values: Tensor) -> Tensor:
    """Float64 ``[n]``: the values above 0, made to sum to 1; equal where nobody has one. NaN counts as 0.

    Example:
        >>> shares(torch.tensor([3.0, 1.0, -1.0]))
        tensor([0.7500, 0.2500, 0.0000], dtype=torch.float64)
    """
    positive = values.double().nan_to_num(0, 0, 0).clamp(min=0)
    total = positive.sum()
    return positive / total if total > 0 else torch.full_like(positive, 1 / len(positive))


def auroc(values: Tensor, bad: Tensor) -> float:
    """The chance that a bad client (bool ``[n]``) has a lower value than another; NaN without one of either.

    Example:
        >>> auroc(torch.tensor([0.5, 0.4, 0.1]), torch.tensor([False, False, True]))
        1.0
    """
    if bad.all() or not bad.any():
        return float("nan")
    # Ranks in [0, 1], which torchmetrics takes for probabilities: any other numbers it would pass through a sigmoid.
    score = 1 - _ranks(values) / len(values)
    return float(binary_auroc(score, bad.int()))


def _ranks(values: Tensor) -> Tensor:
    return torch.from_numpy(stats.rankdata(_filled(values).numpy()))


def _filled(values: Tensor) -> Tensor:
    """Float64, NaN as the least of the others."""
    values = values.detach().cpu().double()
    known = values[values.isfinite()]
    return values.where(values.isfinite(), known.min() if len(known) else torch.zeros((), dtype=torch.float64))
