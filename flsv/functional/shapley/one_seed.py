r"""Confidence intervals for Shapley values from coalitions that were trained with a single seed.

One training per coalition does not show how much the values differ between seeds. Two parts of this error can be
estimated from a single seed's trainings. The standard error e_i of a fit to few coalitions measures the uncertainty
from coalitions that were not trained (0 if all were). And the utility of the empty coalition, that of the untrained
model, is part of every value: if it has the standard deviation s_0 between initial weights, it moves each of n values
by s_0 / n.

The effect of different initial weights and batches on trained coalitions was measured instead: in the federations of
``flsv.benchmark``'s tuning set of which all coalitions are trained, the values of one seed deviate from the mean of
other seeds by 2 % of G, the sum of all positive values (by 2.5 % if the effect of the untrained model is included,
where s_0 is not known). The standard error of the value of player i is therefore

    deviation_i = ( e_i^2 + (s_0 / n)^2 + (0.02 G)^2 )^(1/2).

Intervals of 1.645 standard errors contain the other seeds' values in 0.89 of the cases on that set, and in 0.87 of the
cases with fits to few coalitions of eight to twenty clients, where the fit's standard error alone would contain 0.67
(``docs/results/retrain.md``). On twelve federations made afterwards they contain 0.80 of the mean of six seeds, in a
regression whose untrained models differ much 0.27 (``docs/results/payments.md``): estimates, not 90 % intervals. The
2 % are an average: single federations have 0.3 to 6 %. An interval from two or more
seeds, which is the federation's own, is to be preferred if the trainings can be afforded.
"""

from __future__ import annotations

from torch import Tensor

#: What the intervals of values of trained coalitions promise; the same words everywhere.
BRACKETS = "The brackets hold the mean over many seeds in about 9 of 10 cases."
#: Deviation of a value between seeds, as a fraction of the sum of all positive values: without the effect of the
#: untrained models, and with it.
SEED_DEVIATION, WITH_UNTRAINED = 0.02, 0.025


def one_seed_stderr(values: Tensor, stderr: Tensor, untrained: Tensor | None = None) -> Tensor:
    """Compute the standard error of Shapley values from one seed's trainings, relative to the mean over many seeds.

    Args:
        values: the Shapley values of n players, ``[n]``, or ``[n, M]`` for M games.
        stderr: the values' standard error due to coalitions that were not trained, of the same shape; 0 if all were.
        untrained: ``[R]`` or ``[R, M]``, the utilities of R >= 2 untrained models with different initial weights, whose
            mean was taken as the utility of the empty coalition; None: a single untrained model was evaluated.

    Returns:
        float64 ``[n]`` or ``[n, M]``.

    Example:
        >>> import torch
        >>> values = torch.tensor([0.3, 0.5, 0.2, -0.1])
        >>> one_seed_stderr(values, torch.zeros(4))
        tensor([0.0250, 0.0250, 0.0250, 0.0250], dtype=torch.float64)
        >>> one_seed_stderr(values, torch.zeros(4), untrained=torch.tensor([0.08, 0.12, 0.10]))
        tensor([0.0206, 0.0206, 0.0206, 0.0206], dtype=torch.float64)
    """
    values, stderr = values.double(), stderr.double()
    paid = values.clamp_min(0).sum(0)
    if untrained is None:
        return (stderr.square() + (WITH_UNTRAINED * paid).square()).sqrt()
    start = untrained.double().std(0) / len(values)
    return (stderr.square() + start.square() + (SEED_DEVIATION * paid).square()).sqrt()
