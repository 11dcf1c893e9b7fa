"""Confidence intervals by Student's t."""

from __future__ import annotations

import math

import torch
from scipy import stats
from torch import Tensor


def half_width(variance: Tensor, freedom: Tensor, level: float) -> Tensor:
    """Compute half the width of a confidence interval by Student's t.

    Args:
        variance: ``[n]``, the estimated variance of each number.
        freedom: ``[n]``, the degrees of freedom of that estimate.
        level: the confidence level, in (0, 1).

    Returns:
        ``[n]``; NaN where ``freedom`` is not above 0.

    Example:
        >>> half_width(torch.tensor([4.0]), torch.tensor([10.0]), 0.9)
        tensor([3.6249])
    """
    return (t_quantile(level, freedom).to(variance) * variance.sqrt()).masked_fill(~(freedom > 0), float("nan"))


def t_quantile(level: float, freedom: Tensor | float = math.inf) -> Tensor:
    """Compute Student's t quantile at (1 + level) / 2: half the width of a confidence interval, in standard errors.

    Args:
        level: the confidence level, in (0, 1).
        freedom: degrees of freedom of the standard error, any shape; inf gives the normal quantile.

    Returns:
        float64, of the shape of ``freedom``.

    Example:
        >>> t_quantile(0.9), t_quantile(0.9, 2)
        (tensor(1.6449, dtype=torch.float64), tensor(2.9200, dtype=torch.float64))
    """
    told = torch.as_tensor(freedom, dtype=torch.float64, device="cpu")
    return torch.as_tensor(stats.t.ppf((1 + level) / 2, told.numpy()), dtype=torch.float64)
