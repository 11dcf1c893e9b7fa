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

MAX_Z_SCORE = 3.5
MIN_FACTOR = 5.0
MAX_NORM = math.sqrt(torch.finfo(torch.float32).max)
"""1.8e19: the squares of larger numbers are infinite in float32."""
MAD_OF_NORMAL = 0.6745
"""The median absolute deviation of normal numbers, in standard deviations."""


def large_updates(
    norms: Tensor,
    threshold: float = MAX_Z_SCORE,
    factor: float = MIN_FACTOR,
) -> Tensor:
    """Find updates that are much longer than others in their cohort, bool ``[k]``, by their norms ``[k]``. The modified
    z-score of a norm's logarithm must exceed ``threshold``, and the norm ``factor`` times the median.
    """
    norms = norms.double()
    logs = norms.log()
    is_finite = logs.isfinite()
    is_overflowing = norms.isnan() | (norms > MAX_NORM)
    if is_finite.sum() < 2:  # no other update to compare with
        return is_overflowing
    median = logs[is_finite].quantile(0.5)  # torch's own median takes the lower of two
    deviations = logs - median
    mad = deviations[is_finite].abs().quantile(0.5)

    # The z-score is 0.6745 deviation / MAD. Both sides are multiplied by the MAD, which may be 0.
    is_outlying = MAD_OF_NORMAL * deviations > threshold * mad
    # Without this condition the norms 1, 1.001 and 1.02, whose MAD is near 0, would have an outlier.
    is_large = deviations > math.log(factor)
    return is_overflowing | (is_outlying & is_large)


def drowning_updates(norms: Tensor, model_norm: float = 0.0) -> Tensor:
    """Find updates so large that a float32 sum with them would lose the digits of the other updates or the model, bool
    ``[k]``, by their norms ``[k]``.
    """
    # A float32 sum loses terms that are smaller than its largest term by a factor of 1 / eps. The model and the median
    # update must not be lost. The median of an even number of norms is the geometric mean of the two in the middle.
    norms = norms.double()
    norm_to_preserve = model_norm
    valid_norms = norms[(norms > 0) & norms.isfinite()]
    if len(valid_norms):
        median_of_logs = valid_norms.log().quantile(0.5)
        norm_to_preserve = max(median_of_logs.exp().item(), model_norm)

    max_norm = MAX_NORM
    if norm_to_preserve > 0:
        precision = torch.finfo(torch.float32).eps
        max_norm = min(MAX_NORM, norm_to_preserve / precision)
    return norms > max_norm
