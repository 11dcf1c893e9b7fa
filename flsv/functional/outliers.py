"""Find the updates of a cohort that are suspiciously large.

The modified z-score of Iglewicz and Hoaglin, "How to Detect and Handle Outliers", ASQC Basic References in Quality
Control 16, 1993, of the logarithms of the updates' norms:

    z_i = 0.6745 (log |d_i| - median) / MAD,    MAD = median_j |log |d_j| - median|.

Their threshold is 3.5. Logarithms, because norms grow in proportion to what makes them differ: learning rates, numbers
of steps. Median and MAD stand up to nearly half of the cohort being wrong, where mean and standard deviation are
carried away by the outlier itself.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

OUTLYING = 3.5


FACTOR = 5.0


LARGEST = math.sqrt(torch.finfo(torch.float32).max)
"""1.8e19: what is longer has an infinite norm in float32."""


def large_updates(norms: Tensor, threshold: float = OUTLYING, factor: float = FACTOR) -> Tensor:
    """Which norms are too large for their cohort.

    An update is, if its modified z-score is above ``threshold`` and its norm above ``factor`` times the median. The
    second condition is for small cohorts, whose MAD may be next to nothing: three norms 1, 1.001 and 1.02 are no
    outlier. Of two clients nobody can say which one is wrong; but whatever the others do, a norm above 1.8e19 counts as
    too large. Updates of zero are left out of median and MAD.

    Args:
        norms: ``[k]``, not negative; infinite is too large.
        threshold: for the modified z-score.
        factor: for the ratio to the median.

    Returns:
        bool ``[k]``.

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
    """Which norms are so large that a sum in float32 would have next to nothing of anything else.

    Those of 1 / eps = 8.4e6 times the model's norm and the median update's, and those above 1.8e19: a sum with one of
    them has lost what the others sent, and models that start from it overflow.

    Args:
        norms: ``[k]``, not negative; NaN where one is not known, which says nothing.
        model_norm: of the model that the updates start from.

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
