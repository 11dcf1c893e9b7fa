"""Outliers: updates that are suspiciously large for their cohort.

They are found by the modified z-score of Iglewicz and Hoaglin, "How to Detect and Handle Outliers", ASQC Basic
References in Quality Control 16, 1993, here of the logarithms of the updates' norms: learning rates and numbers of
steps multiply norms. The median and the median absolute deviation (MAD) stay reliable if nearly half of the cohort is
wrong, whereas a single outlier can change the mean and the standard deviation at will.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

OUTLYING = 3.5
FACTOR = 5.0
LARGEST = math.sqrt(torch.finfo(torch.float32).max)
"""1.8e19: the squares of larger entries are infinite in float32."""


def large_updates(norms: Tensor, threshold: float = OUTLYING, factor: float = FACTOR) -> Tensor:
    """Find the norms that are too large for their cohort.

        z_i = 0.6745 (log |d_i| - median) / MAD,    MAD = median_j |log |d_j| - median|

    The norm of the update d_i is too large if its modified z-score z_i is above ``threshold`` and the norm is above
    ``factor`` times the median norm. The second condition is for small cohorts, whose MAD may be close to 0: among
    norms of 1, 1.001 and 1.02 none is an outlier. Of two clients neither is found, since either may be wrong. A norm
    above 1.8e19 is always too large. Updates of zero do not enter the median and the MAD.

    Args:
        norms: the updates' norms, ``[k]``, not negative; infinite norms are too large.
        threshold: the largest z-score that is not an outlier; the authors recommend 3.5.
        factor: the largest ratio of a norm to the median norm that is not an outlier.

    Returns:
        bool ``[k]``, True for outliers.

    Example:
        >>> large_updates(torch.tensor([1.0, 1.3, 0.8, 1e30, 0.0]))
        tensor([False, False, False,  True, False])
        >>> large_updates(torch.tensor([1.0, 1.001, 1.02]))
        tensor([False, False, False])
    """
    logs = norms.double().log()
    known = logs.isfinite()
    overflowing = ~(norms.double() <= LARGEST)
    if not known.any():
        return overflowing
    median = logs[known].quantile(0.5)
    above = logs - median
    mad = above[known].abs().quantile(0.5)
    return overflowing | ((0.6745 * above > threshold * mad) & (above > math.log(factor)))


def drowning_updates(norms: Tensor, model_norm: float = 0.0) -> Tensor:
    """Find the updates that are so large that a float32 sum with them would lose the digits of all other updates.

    Their norms are above 8.4e6 (1 / eps of float32) times the larger of the model's norm and the median norm, or above
    1.8e19. Models that start from a sum with such an update overflow.

    Args:
        norms: the updates' norms, ``[k]``, not negative; NaN for an unknown norm, for which the result is False.
        model_norm: the norm of the model from which the updates start.

    Returns:
        bool ``[k]``, True for norms that are too large.

    Example:
        >>> drowning_updates(torch.tensor([1.0, 1.3, 1e6, 1e11, 0.0]), model_norm=2.0)
        tensor([False, False, False,  True, False])
    """
    norms = norms.double()
    moved = norms[(norms > 0) & norms.isfinite()]
    median = moved.log().quantile(0.5).exp().item() if len(moved) else 0.0
    scale = max(median, model_norm)
    most = min(LARGEST, scale / torch.finfo(torch.float32).eps) if scale > 0 else LARGEST
    return norms > most
