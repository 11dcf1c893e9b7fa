"""Replacement of NaN by the mean of the other values."""

from __future__ import annotations

import torch
from torch import Tensor


def nan_to_mean(values: Tensor) -> Tensor:
    """Replace NaN by the mean of the other values; by 1 if all are NaN.

    Args:
        values: floating-point, of any shape.

    Example:
        >>> nan_to_mean(torch.tensor([1.0, float("nan"), 3.0]))
        tensor([1., 2., 3.])
    """
    known = ~values.isnan()
    mean = values[known].mean() if known.any() else torch.ones((), dtype=values.dtype, device=values.device)
    return torch.where(known, values, mean)
