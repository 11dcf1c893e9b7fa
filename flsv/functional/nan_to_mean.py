"""Replacement of NaN by the mean of the other values."""

from __future__ import annotations

import torch
from torch import Tensor


def nan_to_mean(values: Tensor) -> Tensor:
    """Replace NaN by the mean of the other values, or by 1 if all are NaN."""
    here = values.cpu()  # one wait for the device instead of three
    known = ~here.isnan()
    mean = here[known].mean() if known.any() else torch.ones((), dtype=here.dtype)
    return torch.where(known, here, mean).to(values.device)
