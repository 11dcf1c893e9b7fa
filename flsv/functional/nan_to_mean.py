"""Replacement of NaN by the mean of the other values."""

from __future__ import annotations

import torch
from torch import Tensor


def nan_to_mean(values: Tensor) -> Tensor:
    """Replace NaN by the mean of the other values, or by 1 if all are NaN."""
    host_values = values.cpu()  # wait for the device only once
    is_valid = ~host_values.isnan()
    if not is_valid.any():
        return torch.ones_like(host_values).to(values.device)
    mean = host_values[is_valid].mean()
    return torch.where(is_valid, host_values, mean).to(values.device)
