"""Confidence intervals by Student's t."""

from __future__ import annotations

import math

import torch
from scipy import stats
from torch import Tensor

#: Confidence level of the intervals in the reports.
LEVEL = 0.9


def half_width(variance: Tensor, freedom: Tensor, level: float) -> Tensor:
    """Compute half the width of a Student's t interval. NaN where ``freedom`` is not above 0."""
    return (t_quantile(level, freedom).to(variance) * variance.sqrt()).masked_fill(~(freedom > 0), float("nan"))


def t_quantile(level: float, freedom: Tensor | float = math.inf) -> Tensor:
    """Compute Student's t quantile at (1 + level) / 2, float64. Normal where ``freedom`` is inf."""
    told = torch.as_tensor(freedom, dtype=torch.float64, device="cpu")
    return torch.as_tensor(stats.t.ppf((1 + level) / 2, told.numpy()), dtype=torch.float64)
