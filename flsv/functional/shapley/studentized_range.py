"""The studentized range: whether sampled values differ, and how many evaluations would show a difference.

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
#: ``STEP``: the ratio of successive numbers of evaluations that :func:`times_to_tell_apart` tries. ``MANY``: from this
#: number on, degrees of freedom count as infinite.
STEP, MANY = 1.25, 1000.0
#: The number of standard deviations t of the true values that are tried, and the largest of them in standard deviations
#: of the sample.
_POINTS, _REACH = 2001, 6.0


def pairs_differ(values: Tensor, stderr: Tensor, freedom: float = math.inf, level: float = LEVEL) -> bool:
    """Test whether any pair of values differs by more than sampling error explains.

    A pair of values v_i and v_j with standard errors e_i and e_j differs if

        |v_i - v_j| / sqrt((e_i^2 + e_j^2) / 2) > q,

    with q the quantile at ``level`` of the studentized range of n standard normal numbers. If all n true values are
    equal, the probability that any pair passes this test is 1 - ``level``. Two departures from Games and Howell make
    the test stricter. All pairs have the same degrees of freedom, the smallest of all values. And e_i^2 counts as at
    least the mean of all e_j^2, since it is 0 if a few samples agree by chance.

    Args:
        values: ``[n]``, one value per player. Players whose value or standard error is NaN are left out.
        stderr: the values' standard errors ``[n]``, for errors that are independent and about normal.
        freedom: the smallest degrees of freedom of any of the standard errors.
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
    """Estimate by which factor to increase the number of evaluations so that a pair of values differs significantly.

    After this increase, :func:`pairs_differ` would return True in half of all cases.

    The estimate is not made from the largest gap: of values that are nearly all noise the gap is itself noise, about q
    standard errors at any budget (q as in :func:`pairs_differ`). It is made from the spread of the values beyond their
    standard error e. If the n true values are normal with standard deviation t, the variance of the estimated values is
    (t^2 + e^2) chi^2_{n-1} / (n - 1). With a flat prior on t this gives a posterior, whose median is taken as t. Since
    e^2 falls in proportion to 1 / (number of evaluations), and the range of the values is that of n standard normal
    numbers times sqrt(t^2 + e^2), the range is above q e in half of all cases as soon as

        t^2 + e^2 >= e^2 (q / m)^2,    m the median of the range of n standard normal numbers.

    Limitation: a spread of the true values below a third of their standard error is not detected. The estimate is then
    too low, but never by a large factor.

    Args:
        values: ``[n]``, see :func:`pairs_differ`, at least two of them not NaN.
        stderr: the values' standard errors ``[n]``, not all 0.
        freedom: the smallest degrees of freedom of any standard error; they grow with the number of evaluations.
        level: the confidence level of all pairs together.

    Returns:
        The factor, 1.25 or more; with few degrees of freedom it is accurate to a quarter.

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
    """Compute a quantile of the studentized range of ``count`` numbers."""
    return float(studentized_range.ppf(level, count, freedom if freedom < MANY else math.inf))


def _known(values: Tensor, stderr: Tensor) -> tuple[Tensor, Tensor]:
    """Return the values with finite standard errors, and the squares of these errors."""
    values, stderr = values.detach().cpu().double(), stderr.detach().cpu().double()
    known = values.isfinite() & stderr.isfinite()
    return values[known], stderr[known].square()
