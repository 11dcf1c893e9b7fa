"""Confidence bounds and intervals by Student's t."""

from __future__ import annotations

import math
from typing import Annotated

import torch
from annotated_types import Ge, Lt
from scipy import stats
from scipy.special import ndtri, stdtrit
from torch import Tensor

from flsv.utilities.declared import checked

Confidence = Annotated[float, Ge(0.5), Lt(1)]


@checked
def lower_bound(
    count: Tensor, mean: Tensor, squares: Tensor, stderr: Tensor | None = None, confidence: Confidence = 0.9
) -> Tensor:
    r"""Compute a one-sided lower confidence bound of the mean of a few independent values.

    .. math:: \bar x - t_{c-1}(\text{confidence})\, s / \sqrt c, \qquad s^2 = \frac1{c-1} \sum (x - \bar x)^2

    with the quantile t of Student's t distribution, the number c of values x, and their mean. A single value has no
    spread: its bound is the value minus its own standard error times the normal quantile.

    Args:
        count: the numbers c of values, ``[...]``; if a number is 0 the bound is NaN.
        mean: the means of the values, ``[...]``.
        squares: the sums of the squared deviations from the means, ``[...]``.
        stderr: the standard errors of single values, ``[...]``, used if ``count`` is 1; NaN and None count as 0.
        confidence: the probability that the mean is above the bound, in [0.5, 1).

    Returns:
        The bounds, float64 ``[...]``.

    Raises:
        ConfigurationError: ``confidence`` is outside [0.5, 1).

    Example:
        >>> two_rounds = torch.tensor([2]), torch.tensor([0.5]), torch.tensor([0.02])
        >>> lower_bound(*two_rounds, confidence=0.9)
        tensor([0.1922], dtype=torch.float64)
    """
    count, mean, squares = count.cpu().double(), mean.cpu().double(), squares.cpu().double()
    freedom = (count - 1).clamp_min(1)
    quantile = torch.from_numpy(stdtrit(freedom.numpy(), confidence)).reshape(count.shape)
    spread = quantile * (squares.clamp_min(0) / freedom / count.clamp_min(1)).sqrt()
    error = torch.zeros_like(mean) if stderr is None else stderr.cpu().double().nan_to_num(0)
    bound = mean - torch.where(count > 1, spread, float(ndtri(confidence)) * error)
    return bound.masked_fill(count == 0, torch.nan)


def half_width(variance: Tensor, freedom: Tensor, level: float) -> Tensor:
    """Compute half the width of a confidence interval by Student's t.

    Args:
        variance: ``[n]``, the estimated variance of each number.
        freedom: ``[n]``, the degrees of freedom of that estimate.
        level: the interval's level, in (0, 1).

    Returns:
        ``[n]``; NaN without any degrees of freedom.

    Example:
        >>> half_width(torch.tensor([4.0]), torch.tensor([10.0]), 0.9)
        tensor([3.6249])
    """
    return (t_quantile(level, freedom).to(variance) * variance.sqrt()).masked_fill(~(freedom > 0), float("nan"))


def t_quantile(level: float, freedom: Tensor | float = math.inf) -> Tensor:
    """Compute half the width of an interval in standard errors: Student's t quantile at (1 + level) / 2.

    Args:
        level: the interval's level, in (0, 1).
        freedom: degrees of freedom of the standard error, any shape; inf: the normal quantile.

    Returns:
        float64, of the shape of ``freedom``.

    Example:
        >>> t_quantile(0.9), t_quantile(0.9, 2)
        (tensor(1.6449, dtype=torch.float64), tensor(2.9200, dtype=torch.float64))
    """
    told = torch.as_tensor(freedom, dtype=torch.float64, device="cpu")
    return torch.as_tensor(stats.t.ppf((1 + level) / 2, told.numpy()), dtype=torch.float64)
