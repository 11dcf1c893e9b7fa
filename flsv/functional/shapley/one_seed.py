r"""Confidence intervals for Shapley values from coalitions that were trained with a single seed.

The intervals are for the mean over many seeds, the value that does not depend on the luck of initial weights and
batches. :data:`BRACKETS` is what they promise. One training per coalition does not show how much values differ between
seeds, but four parts of the difference can be estimated. With n clients and G the sum of all positive values, the
standard error of the value of client i is

    deviation_i = ( e_i^2 + (0.025 G)^2 + (s_0 / n)^2 + r^2 )^(1/2):

- e_i: the standard error due to coalitions that were not trained (0 if all were), see :func:`prediction_stderr`.
- 0.025 G: the usual deviation of one seed's values from the mean of other seeds, as far as the next two parts do not
  explain it.
- s_0: the standard deviation of the utility between untrained models with different initial weights. The empty
  coalition's utility is part of every value, and its deviation shifts each value by s_0 / n. This part matters most in
  regressions and where little is gained. If s_0 is not known, 0.045 G replaces both parts.
- r: the standard deviation of a value over the last three rounds, as root mean square over the clients. It is largest
  where a sampler draws the clients.

The constants were chosen on the tuning set of ``flsv.benchmark``: 32 federations of up to seven clients, in which all
coalitions were trained with three to five seeds. There the intervals contain the mean of the other seeds, allowing for
its own error, for 0.92 of the clients. On eight federations made afterwards they contain 0.96 of the values (0.85 in
the worst federation), in trials with version 1.2.0. If you can afford to train with two or more seeds, prefer the
interval from these, which measures the spread of your own federation.
"""

from __future__ import annotations

from torch import Tensor

#: The promise of these intervals, in the words that all reports use.
BRACKETS = "The brackets hold the mean over many seeds in about 9 of 10 cases."
#: Standard deviation of a value between seeds, as a fraction of the sum of all positive values: without and with the
#: part that comes from the untrained models.
SEED_DEVIATION, WITH_UNTRAINED = 0.025, 0.045
#: Standard error of predicted values, as a multiple of the difference between the two predictions.
OF_DISAGREEMENT = 0.75


def one_seed_stderr(
    values: Tensor, stderr: Tensor, untrained: Tensor | None = None, recent: Tensor | None = None
) -> Tensor:
    """Compute one seed's standard error of the mean Shapley values over many seeds.

    Args:
        values: one seed's values, ``[n]``, or ``[n, M]`` for M games.
        stderr: their standard error due to coalitions that were not trained.
        untrained: ``[R]`` or ``[R, M]``, the utilities of R >= 2 untrained models with different initial weights.
        recent: ``[L, n]`` or ``[L, n, M]``, the values after each of the last L >= 2 rounds.
    """
    values, stderr = values.double(), stderr.double()
    paid = values.clamp_min(0).sum(0)
    variance = stderr.square() + ((WITH_UNTRAINED if untrained is None else SEED_DEVIATION) * paid).square()
    if untrained is not None:
        variance = variance + (untrained.double().std(0) / len(values)).square()
    if recent is not None:
        variance = variance + recent.double().var(0).mean(0)
    return variance.sqrt()


def prediction_stderr(disagreement: Tensor) -> Tensor:
    """Compute the standard error of predicted values from the two predictions' difference ``[n]`` or ``[n, M]``."""
    return (OF_DISAGREEMENT * disagreement.double().square().mean(0).sqrt()).expand(disagreement.shape).clone()
