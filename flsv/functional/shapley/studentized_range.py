"""The studentized range: whether sampled values differ, and how many evaluations would show it.

Games and Howell, "Pairwise multiple comparison procedures with unequal n's and/or variances", Journal of Educational
Statistics 1, 1976.
"""

from __future__ import annotations

import math
from functools import cache

import torch
from scipy.stats import studentized_range
from torch import Tensor

LEVEL = 0.95
#: The factor from one tried number of evaluations to the next; degrees of freedom that count as infinite.
STEP, MANY = 1.25, 1000.0
#: How many standard deviations t are tried, and the largest of them in those of the sample.
_POINTS, _REACH = 2001, 6.0


def pairs_differ(values: Tensor, stderr: Tensor, freedom: float = math.inf, level: float = LEVEL) -> bool:
    """Test whether any pair of values differs by more than sampling error explains.

    At least one of all n (n - 1) / 2 pairs differs where

        |v_i - v_j| / sqrt((e_i^2 + e_j^2) / 2) > q,

    with q the quantile of the studentized range of n standard normal numbers: among n equal values some pair passes
    this test in 5 % of all cases. Games and Howell use degrees of freedom for each pair; here the smallest of any value
    is used, and each e_i^2 is at least the mean of all, since a few samples that agree by chance make it 0. Both make
    the test stricter.

    Args:
        values: ``[n]``. Players with a NaN in their value or its error are left out.
        stderr: the values' standard errors ``[n]``, of independent and about normal errors.
        freedom: the smallest degrees of freedom of any error.
        level: the confidence level of all pairs together.

    Example:
        >>> errors = torch.full((3,), 0.1)
        >>> pairs_differ(torch.tensor([0.0, 0.1, 0.3]), errors), pairs_differ(torch.tensor([0.0, 0.1, 0.9]), errors)
        (False, True)
    """
    values, variances = _known(values, stderr)
    if len(values) < 2:
        return False
    variances = variances.clamp_min(float(variances.mean()))
    gaps = (values[:, None] - values).abs()
    scale = ((variances[:, None] + variances) / 2).sqrt()
    return bool((gaps > _range(level, len(values), freedom) * scale).any())


def times_to_tell_apart(values: Tensor, stderr: Tensor, freedom: float = math.inf, level: float = LEVEL) -> float:
    """Estimate by which factor more evaluations would tell a pair apart in half of all cases.

    The largest gap between values that are nearly all noise is itself noise, about q standard errors at any budget, and
    does not determine the number of evaluations. The spread of the values beyond their error e does: for normal true
    values of standard deviation t, the sample's variance s^2 is (t^2 + e^2) chi^2_{n-1} / (n - 1). With a flat prior
    this gives t a distribution, whose median is taken. e^2 falls as 1 / N, and the range of the values is that of n
    normal numbers times sqrt(t^2 + e^2), which in half of all cases is above q e as soon as

        t^2 + e^2 >= e^2 (q / m)^2,    m the range's median.

    For values that spread by less than a third of their error the estimate is too low, but never by a large factor,
    since such a small spread is not detected.

    Args:
        values: ``[n]``, see :func:`pairs_differ`, at least two of them not NaN.
        stderr: the values' standard errors ``[n]``, not all 0.
        freedom: the smallest degrees of freedom of any error; they grow with the evaluations.
        level: the confidence level of all pairs together.

    Returns:
        1.25 or more; with few degrees of freedom accurate to a quarter.

    Example:
        >>> values = torch.tensor([0.3, -0.1, 0.2, -0.2, 0.0, 0.5])
        >>> round(times_to_tell_apart(values, torch.full((6,), 0.2)), 1)
        1.5
    """
    values, variances = _known(values, stderr)
    n, error, variance = len(values), float(variances.mean()), float(values.var())
    spreads = torch.linspace(0, _REACH * math.sqrt(max(variance, error)), _POINTS, dtype=torch.float64).square()
    likely = -(n - 1) / 2 * ((spreads + error).log() + variance / (spreads + error))
    below = (likely - likely.max()).exp().cumsum(0)
    spread = float(spreads[int(torch.searchsorted(below, float(below[-1]) / 2))])
    noise, median, times = error / spread, _range(0.5, n), 1.0
    if freedom >= MANY:
        return max(STEP, ((_range(level, n) / median) ** 2 - 1) * noise)
    while times < max(STEP, ((_range(level, n, freedom * times) / median) ** 2 - 1) * noise):
        times *= STEP
    return times


@cache
def _range(level: float, count: int, freedom: float = math.inf) -> float:
    """Compute a quantile of the studentized range."""
    return float(studentized_range.ppf(level, count, freedom if freedom < MANY else math.inf))


def _known(values: Tensor, stderr: Tensor) -> tuple[Tensor, Tensor]:
    """Return the finite values and the squares of their errors, float64."""
    values, stderr = values.detach().cpu().double(), stderr.detach().cpu().double()
    known = values.isfinite() & stderr.isfinite()
    return values[known], stderr[known].square()
