r"""Confidence intervals for Shapley values from coalitions that were trained with a single seed.

**What is promised**: :data:`BRACKETS`. The mean over many seeds is the value that does not depend on the luck of
initial weights and batches. One training per coalition does not show how much values differ between seeds, but four
parts of it can be estimated. With n clients and G the sum of all positive values, the standard error of the value of
client i is

    deviation_i = ( e_i^2 + (0.025 G)^2 + (s_0 / n)^2 + r^2 )^(1/2):

- e_i, the standard error of a fit to few coalitions (0 if all were trained);
- 0.025 G: by about so much the values of one seed deviate from the mean of the others, beside the next two parts;
- s_0, the standard deviation between untrained models with different initial weights: the utility of the empty
  coalition is part of every value and moves each of them by s_0 / n, the most in regressions and where little is
  gained. If it is not known, 0.045 G stands for both parts;
- r, the standard deviation of the values after the last three rounds, the root of the mean of its square over clients:
  it is largest where a sampler draws the clients.

The constants were chosen on ``flsv.benchmark``'s tuning set, whose 32 federations of up to seven clients have all
coalitions trained with three to five seeds: there these intervals hold the mean of the other seeds, allowing for its
own error, for 0.92 of the clients. On eight federations made afterwards they hold 0.96 of the values (0.85 in the worst
federation), see ``docs/results/payments.md``. An interval from two or more seeds, which is the federation's own, is to
be preferred if the trainings can be afforded.
"""

from __future__ import annotations

from torch import Tensor

#: What the intervals of values of trained coalitions promise; the same words everywhere.
BRACKETS = "The brackets hold the mean over many seeds in about 9 of 10 cases."
#: Deviation of a value between seeds, as a fraction of the sum of all positive values: without the effect of the
#: untrained models, and with it.
SEED_DEVIATION, WITH_UNTRAINED = 0.025, 0.045


def one_seed_stderr(
    values: Tensor, stderr: Tensor, untrained: Tensor | None = None, recent: Tensor | None = None
) -> Tensor:
    """Compute the standard error of Shapley values from one seed's trainings, relative to the mean over many seeds.

    Args:
        values: the Shapley values of n players, ``[n]``, or ``[n, M]`` for M games.
        stderr: the values' standard error due to coalitions that were not trained, of the same shape; 0 if all were.
        untrained: ``[R]`` or ``[R, M]``, the utilities of R >= 2 untrained models with different initial weights; None:
            they are not known.
        recent: ``[L, n]`` or ``[L, n, M]``, the values after the last L >= 2 rounds; None: they are not known.

    Returns:
        float64 ``[n]`` or ``[n, M]``.

    Example:
        >>> import torch
        >>> values = torch.tensor([0.3, 0.5, 0.2, -0.1])
        >>> one_seed_stderr(values, torch.zeros(4))
        tensor([0.0450, 0.0450, 0.0450, 0.0450], dtype=torch.float64)
        >>> one_seed_stderr(values, torch.zeros(4), untrained=torch.tensor([0.08, 0.12, 0.10]))
        tensor([0.0255, 0.0255, 0.0255, 0.0255], dtype=torch.float64)
    """
    values, stderr = values.double(), stderr.double()
    paid = values.clamp_min(0).sum(0)
    variance = stderr.square() + ((WITH_UNTRAINED if untrained is None else SEED_DEVIATION) * paid).square()
    if untrained is not None:
        variance = variance + (untrained.double().std(0) / len(values)).square()
    if recent is not None:
        variance = variance + recent.double().var(0).mean(0)
    return variance.sqrt()
