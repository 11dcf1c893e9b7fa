"""Leverage SHAP: kernel regression on coalitions drawn by their leverage scores.

Musco and Witter, "Provably Accurate Shapley Value Estimation via Leverage Score Sampling", ICLR 2025. The Shapley value
solves KernelSHAP's weighted least-squares problem (see ``regression``). A row of that problem has the leverage score
1 / binom(n, |S|): sampling coalitions by their leverage means as many of every size, where KernelSHAP draws the
smallest and the largest most often. A coalition drawn with probability pi(S) gets the weight w(S) / pi(S), w being the
kernel, and comes with its complement, without replacement.

Departures: the number of coalitions of each size is fixed (equal, up to rounding and up to how many there are) where
the paper draws it, as the authors' newer code does; each size is drawn at least twice (as a pair), so that there is a
standard error, the one of ``regression``. Where the drawn rows do not determine the solution, the one of least norm is
taken, as in the authors' code.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Generator, Tensor

from flsv.functional.shapley.budget import Sampling
from flsv.functional.shapley.estimate import ShapleyEstimate, Utility
from flsv.functional.shapley.exact import exact_shapley
from flsv.functional.shapley.layers import Layer, LayeredSample, estimate_in_stages
from flsv.functional.shapley.regression import kernel_regression


def leverage_shapley(
    utility: Utility,
    num_players: int,
    *,
    budget: int | None = None,
    generator: Generator | None = None,
    target_stderr: float | None = None,
) -> ShapleyEstimate:
    """Kernel regression on pairs of coalitions, equally many of every size.

    Args:
        utility: ``masks: bool [K, n] -> float [K]`` or ``[K, M]``.
        num_players: n.
        budget: largest number of distinct evaluations, default 50 n. The minimum is n pairs beside the empty and the
            grand coalition, 2 n + 2, or two pairs of every size where that is more.
        generator: source of the coalitions.
        target_stderr: stop as soon as every standard error is at most this, in the utility's unit.

    Returns:
        ``values`` and ``stderr`` ``[n]`` or ``[n, M]``; exact, stderr 0, where the budget buys all coalitions. The
        estimate is consistent, with a bias of order 1/m as for ``regression``.

    Raises:
        ConfigurationError: a budget below the minimum, which is named.
        ValueError: a utility that is NaN, infinite or of the wrong shape.

    Example:
        >>> additive = lambda masks: masks.double() @ torch.arange(12.0, dtype=torch.float64)
        >>> sampled = leverage_shapley(additive, 12, budget=60, generator=torch.Generator().manual_seed(0))
        >>> sampled.values[:3].abs().round()
        tensor([0., 1., 2.], dtype=torch.float64)
    """
    sample = LayeredSample(num_players, paired=True, share=equally, ends=False, generator=generator)
    sample.minimum = min(max(num_players, sample.minimum), sample.capacity)
    run = Sampling("leverage_shapley", utility, num_players, budget, 2 + 2 * sample.minimum, target_stderr)
    if run.exact:
        return exact_shapley(utility, num_players)
    return estimate_in_stages(run, sample, partial(kernel_regression, run.game, sample, least_norm))


def equally(layer: Layer) -> float:
    """Weights of layers under which all sizes get equally many coalitions."""
    return layer.sizes


def least_norm(matrix: Tensor, right: Tensor) -> Tensor:
    """The solution of least norm; ``matrix [n, n]`` may be singular."""
    return torch.linalg.pinv(matrix, rtol=1e-10, hermitian=True) @ right
