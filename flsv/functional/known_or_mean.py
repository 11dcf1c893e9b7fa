"""The mean of the known values in place of unknown ones."""

from __future__ import annotations

import torch
from torch import Tensor


def known_or_mean(values: Tensor) -> Tensor:
    """``values`` with the mean of the known ones in place of NaN; all ones if none is known."""
    known = ~values.isnan()
    mean = values[known].mean() if known.any() else torch.ones((), dtype=values.dtype, device=values.device)
    return torch.where(known, values, mean)
