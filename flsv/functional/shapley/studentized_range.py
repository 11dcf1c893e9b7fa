"""Whether sampled values tell any pair of players apart, and how many evaluations would.

Games and Howell, "Pairwise multiple comparison procedures with unequal n's and/or variances", Journal of Educational
Statistics 1, 1976: at least one of all n (n - 1) / 2 pairs is told apart where

    |v_i - v_j| / sqrt((e_i^2 + e_j^2) / 2) > q,

the quantile of the range of n standard normal numbers, studentized: of n equal values a pair passes it in 5 % of all
cases. (Theirs has degrees of freedom for each pair; here the least of any value, and no e_i^2 counts for less than the
mean of all, since a few samples that are alike by chance make it 0: which is stricter.)

The largest gap of values that are all but noise is noise, too, some q times the standard error at any budget, so that
it does not say how many evaluations it takes. What does is how far the values spread beyond their error e: of normal
true values of standard deviation t the sample's variance s^2 is (t^2 + e^2) chi^2_{n-1} / (n - 1), which with all t
alike before gives t a distribution, of which the median is taken. e^2 falls as 1 / N, and the range of the values is
that of n normal numbers times sqrt(t^2 + e^2), which in half of all cases is above q e as soon as

    t^2 + e^2 >= e^2 (q / m)^2,    m the range's median.
"""

from __future__ import annotations

import math
from functools import cache

import torch
from scipy.stats import studentized_range
from torch import Tensor

LEVEL = 0.95
#: By which factor more evaluations are tried; degrees of freedom from which on errors are as good as known.
STEP, MANY = 1.25, 1000.0
#: Standard deviations that are looked at, up to so many times that of the sample.
_POINTS, _REACH = 2001, 6.0


def pairs_differ(values: Tensor, stderr: Tensor, freedom: float = math.inf, level: float = LEVEL) -> bool:
    """Whether any pair of values differs by more than their errors make all of them differ by chance.

    Args:
        values: ``[n]``; those that are not known (NaN, in either) are left out.
        stderr: their standard errors ``[n]``, independent and about normal.
        freedom: the errors' degrees of freedom, the least of them.
        level: of all pairs together.

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
    """How many times as many evaluations would tell a pair apart, in half of all cases.

    An estimate, by the module's formula: of values that spread by less than a third of their error it is too few, and
    never many times too few, since so small a spread is not seen.

    Args:
        values: ``[n]``, see :func:`pairs_differ`, of which two are known at least.
        stderr: their standard errors ``[n]``, not all 0.
        freedom: the errors' degrees of freedom, the least of them, which grow with the evaluations.
        level: of all pairs together.

    Returns:
        1.25 or more; with few degrees of freedom within a quarter.

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
    """A quantile of the studentized range."""
    return float(studentized_range.ppf(level, count, freedom if freedom < MANY else math.inf))


def _known(values: Tensor, stderr: Tensor) -> tuple[Tensor, Tensor]:
    """Float64, without those of which either is not known: the values, and the errors' squares."""
    values, stderr = values.detach().cpu().double(), stderr.detach().cpu().double()
    known = values.isfinite() & stderr.isfinite()
    return values[known], stderr[known].square()
