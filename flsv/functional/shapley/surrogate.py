"""Surrogate-adjusted sampling: the exact Shapley value of a fitted game plus the sampled Shapley value of the rest.

The Shapley value is linear in the game, so for any game g

    SV(U) = SV(g) + SV(U - g).

g is fitted to the sampled coalitions by kernel ridge regression (a Gaussian process), and SV(g) is exact (``kernels``).
What g has not understood is estimated from the same evaluations, without any fit of its own: with V the residual's gain
from nobody to everybody,

    SV_i(r) = V/n + n sum_{s=1..n-1} 1/(s (n - s)) E_{|S|=s}[ r(S) (z_i - s/n) ]

which is KernelSHAP with the expectation of its matrix (that is a multiple of the centring matrix) in place of the
sampled one, hence unbiased; S and its complement together contribute (r(S) - r(N \\ S)) (z_i - s/n). The sample is the
paired, layered one of ``layers``, without replacement.

Regression-adjusted Monte Carlo (Witter, Liu and Musco 2025; see ``regression_adjusted``) is the same scheme with linear
or tree regressions as g, found independently. The fit, and what is done below, is no paper's. Choices:

- *Kernels.* ``"additive"``: membership. ``"quadratic"``: membership + pairwise products + membership / |S|.
  ``"averaging"``: membership + Gaussian in the averaging weights z / |S|, of four widths. ``"auto"`` (default):
  whichever of all those explains the sample best. Each part is scaled to unit variance over the sample.
- *Kernel, width and ridge penalty* by marginal likelihood, one choice for all columns of a vector-valued game. No
  evaluations are set aside for it.
- *Bias.* By default g is fitted to the very coalitions whose residuals correct it, which shrinks these residuals: the
  estimate is biased towards the surrogate's value, and closer to the truth for it. ``unbiased=True`` fits on all folds
  but one and corrects by the residuals of that one, averaged over five folds; coalitions in the fit enter with their
  known residuals, so that nothing but the coalitions never evaluated is extrapolated.
- *Standard error*: layered sampling variance of the residuals, each as it was before its own coalition was fitted
  (leave-one-out residuals in closed form, or the held-out ones). With ``unbiased=True`` it is the spread to within
  25 % or so; by default it is an estimate on the large side, 1 to 1.8 times the spread, except on very smooth games,
  where it can be too small (0.6 times). *The bias is not in it*: ``docs/results/intervals.md`` has how often 90 %
  intervals made of it hold the value.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Generator, Tensor

from flsv.errors import ConfigurationError
from flsv.functional.shapley.adjusted import AdjustedEstimator
from flsv.functional.shapley.budget import Sampling
from flsv.functional.shapley.exact import exact_shapley
from flsv.functional.shapley.game import ShapleyEstimate, Utility
from flsv.functional.shapley.kernels import (
    Kernel,
    averaged_membership,
    gaussian,
    gram,
    kernel_shapley,
    membership,
    pairs,
)
from flsv.functional.shapley.layers import LayeredSample, estimate_in_stages

SURROGATES: dict[str, list[list[Kernel]]] = {
    "additive": [[membership]],
    "quadratic": [[membership, pairs, averaged_membership]],
    "averaging": [[membership, gaussian(width)] for width in (0.1, 0.3, 1.0, 3.0)],
}
SURROGATES["auto"] = [parts for name in ("averaging", "quadratic", "additive") for parts in SURROGATES[name]]

_PENALTIES = 10.0 ** torch.arange(-8, 2.5, 0.5, dtype=torch.float64)
_CONSTANT = 100.0  # prior variance of the mean utility, in units of the sample's variance: vague


@dataclass
class Surrogate:
    """A fitted game g(S) = mean + sum_T a_T k(S, T)."""

    parts: list[tuple[Kernel, float]]
    coalitions: Tensor
    coefficients: Tensor
    offset: Tensor

    def __call__(self, masks: Tensor) -> Tensor:
        """g, ``[K, M]``, of coalitions bool ``[K, n]``."""
        kernel = sum((scale * gram(part, masks, self.coalitions) for part, scale in self.parts), torch.zeros(()))
        return self.offset + kernel @ self.coefficients

    def shapley(self) -> Tensor:
        """Exact Shapley values of g, ``[n, M]``."""
        values = sum((scale * kernel_shapley(part, self.coalitions) for part, scale in self.parts), torch.zeros(()))
        return values.T @ self.coefficients


def fit_surrogate(candidates: list[list[Kernel]], masks: Tensor, utilities: Tensor) -> tuple[Surrogate, Tensor]:
    """The candidate and ridge penalty of largest marginal likelihood, and its leave-one-out residuals.

    Args:
        candidates: kernels, each given as the parts of a sum.
        masks: bool ``[m, n]``, distinct.
        utilities: float64 ``[m, M]``.

    Returns:
        The fit, and the residual ``[m, M]`` of each coalition under the fit to all others.
    """
    mean, scale = utilities.mean(dim=0), utilities.std(dim=0)
    scale = torch.where(scale > 1e-12 * (1 + mean.abs()), scale, torch.inf)  # a constant column is all mean
    y = (utilities - mean) / scale
    best = None
    for kernels in candidates:
        parts, matrix = [], torch.full((len(masks), len(masks)), _CONSTANT, dtype=torch.float64)
        for kernel in kernels:
            part = gram(kernel, masks, masks)
            variance = (part.diagonal().mean() - part.mean()).clamp_min(1e-12)
            parts.append((kernel, 1 / float(variance)))
            matrix = matrix + part / variance
        eigenvalues, vectors = torch.linalg.eigh(matrix)
        eigenvalues = eigenvalues.clamp_min(0)
        shrunk = eigenvalues[None] + _PENALTIES[:, None]
        power = ((vectors.T @ y).square()[None] / shrunk[..., None]).mean(dim=1).clamp_min(1e-12)
        loss = power.log().mean(dim=1) + shrunk.log().mean(dim=1)
        at = int(loss.argmin())
        if best is None or float(loss[at]) < best[0]:
            best = float(loss[at]), parts, vectors, shrunk[at]
    assert best is not None
    _, parts, vectors, spectrum = best
    dual = vectors @ ((vectors.T @ y) / spectrum.unsqueeze(1))
    left_out = dual / (vectors.square() / spectrum).sum(dim=1, keepdim=True)
    finite = torch.where(scale.isinf(), 0, scale)
    return Surrogate(parts, masks, dual * finite, mean + _CONSTANT * dual.sum(dim=0) * finite), left_out * finite


def surrogate_shapley(
    utility: Utility,
    num_players: int,
    *,
    surrogate: str = "auto",
    unbiased: bool = False,
    budget: int | None = None,
    generator: Generator | None = None,
    target_stderr: float | None = None,
) -> ShapleyEstimate:
    """Shapley value of a surrogate fitted to the sampled coalitions, plus that of its residuals.

    Args:
        utility: ``masks: bool [K, n] -> float [K]`` or ``[K, M]``.
        num_players: n.
        surrogate: ``"auto"``, ``"averaging"``, ``"quadratic"`` or ``"additive"``.
        unbiased: correct only by residuals of coalitions that the fit has not seen.
        budget: largest number of distinct evaluations, default 50 n. The minimum is all coalitions of size 1 and n - 1
            and two pairs of every other size, 4 n - 2 for even n and 4 n - 4 for odd n.
        generator: source of the coalitions.
        target_stderr: stop as soon as every standard error is at most this, in the utility's unit.

    Returns:
        ``values`` and ``stderr`` ``[n]`` or ``[n, M]``; exact, stderr 0, where the budget buys all coalitions.

    Raises:
        ConfigurationError: a budget below the minimum, which is named, or an unknown surrogate.
        ValueError: a utility that is NaN, infinite or of the wrong shape.

    Example:
        A coalition averages its members' updates; its loss is quadratic in the average.

        >>> updates = torch.linspace(-1, 2, 12, dtype=torch.float64)
        >>> loss = lambda masks: (masks @ updates / masks.sum(dim=1).clamp_min(1) - 1) ** 2
        >>> utility = lambda masks: -loss(masks.double())
        >>> sampled = surrogate_shapley(utility, 12, budget=100, generator=torch.Generator().manual_seed(0))
        >>> (sampled.values - exact_shapley(utility, 12).values).abs().max() < 0.01
        tensor(True)
    """
    name = "surrogate_shapley"
    if surrogate not in SURROGATES:
        raise ConfigurationError(f"{name}: surrogate={surrogate!r} is unknown; choose from {sorted(SURROGATES)}.")
    sample = LayeredSample(num_players, paired=True, generator=generator)
    run = Sampling(name, utility, num_players, budget, 2 + 2 * sample.minimum, target_stderr)
    if num_players <= 2 or run.exact:
        return exact_shapley(utility, num_players)
    fit = partial(fit_surrogate, SURROGATES[surrogate])
    return estimate_in_stages(run, sample, AdjustedEstimator(run.game, sample, fit, 5 if unbiased else 1))
