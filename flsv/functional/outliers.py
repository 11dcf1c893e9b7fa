"""Outliers: updates that are suspiciously large for their cohort.

Iglewicz and Hoaglin, "How to Detect and Handle Outliers", ASQC Basic References in Quality Control 16, 1993: the
modified z-score, here of the logarithms of the updates' norms. Logarithms, since norms grow in proportion to what makes
them differ: learning rates, numbers of steps. Median and MAD withstand nearly half of the cohort being wrong; a single
outlier is enough to carry mean and standard deviation away.
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

    An update is too large if its modified z-score is above ``threshold`` and its norm above ``factor`` times the
    median. The second condition is for small cohorts, whose MAD may be next to nothing: among norms of 1, 1.001 and
    1.02 none is an outlier. Among two clients neither is found, since either one may be wrong. A norm above 1.8e19 is
    always too large. Updates of zero are left out of median and MAD.

    Args:
        norms: ``[k]``, not negative; infinite norms are too large.
        threshold: the largest usual z-score; the authors recommend 3.5.
        factor: the largest usual ratio to the median.

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
    """Find the norms that are so large that a float32 sum would lose all other updates.

    These are the norms above 1 / eps = 8.4e6 times the model's norm and the median update's, and those above 1.8e19: a
    sum that contains such an update has lost what the others sent, and models that start from it overflow.

    Args:
        norms: ``[k]``, not negative; NaN where a norm is not known, which is never found.
        model_norm: the norm of the model from which the updates start.

    Returns:
        bool ``[k]``.

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
