r"""Surrogate games whose Shapley value is known in closed form: kernels of |S n T|, |S| and |T|.

A kernel-ridge (Gaussian process) fit of a game is g(S) = sum_T a_T k(S, T) over the observed coalitions T. The Shapley
value is linear, so that of g is known as soon as those of the games S -> k(S, T) are. If k(S, T) = k(j, s, t) depends
on j = |S n T|, s = |S|, t = |T| only, the members of T are interchangeable in that game, and so are the others: it has
two values, and with s predecessors of which j in T (hypergeometric, since the predecessors of a player are a uniform
coalition of uniform size)

    inside(t)  = 1/n sum_{s=0..n-1} sum_j  C(t-1, j) C(n-t, s-j) / C(n-1, s)    [k(j+1, s+1, t) - k(j, s, t)]
    outside(t) = 1/n sum_{s=0..n-1} sum_j  C(t, j)   C(n-1-t, s-j) / C(n-1, s)  [k(j,   s+1, t) - k(j, s, t)].

This is exact for any such k, at a cost of n^2 per t and none of it coalition evaluations. Ridge regression on explicit
features is the special case where k is their inner product:

- membership z_i: k = j. The feature's own value is 1 for its player, 0 for the others.
- pairwise products z_i z_k: k = j (j - 1) / 2. The value is 1/2 for either of the two.
- membership / |S|, the linear term of a game whose coalitions *average* their members' updates: k = j / (s t). Player i
  gets z_i / |S| = 1 / (s + 1) on joining, and takes from it on later arrivals of others, so the feature of player i is
  worth  E[1/(s+1)] = H_n / n  to i (H_n the harmonic number), and by efficiency (1/n - H_n/n) / (n - 1) =
  -(H_n - 1) / (n (n - 1))  to every other player.

The Gaussian kernel goes further along the same line. A coalition's model is x + mean_{i in S} d_i, a function of the
weight vector c_S = z / |S|; coalitions with close c_S have close utilities, and
|c_S - c_T|^2 = 1/s + 1/t - 2 j / (s t). Its expansion contains all products of the averages, to every order.

Surrogate-adjusted sampling: the exact Shapley value of a fitted game plus the sampled Shapley value of the rest.

The Shapley value is linear in the game, so for any game g

    SV(U) = SV(g) + SV(U - g).

g is fitted to the sampled coalitions by kernel ridge regression (a Gaussian process), and SV(g) is exact (``kernels``).
What g has not understood is estimated from the same evaluations, without any fit of its own: with V the residual's gain
from nobody to everybody,

    SV_i(r) = V/n + n sum_{s=1..n-1} 1/(s (n - s)) E_{|S|=s}[ r(S) (z_i - s/n) ]

which is KernelSHAP with the expectation of its matrix (that is a multiple of the centring matrix) in place of the
sampled one, hence unbiased, and maximum sample reuse (Witter, Liu and Musco 2025); S and its complement together
contribute (r(S) - r(N \ S)) (z_i - s/n). The sample is the paired, layered one of ``layers``, without replacement.

Regression-adjusted Monte Carlo (Witter, Liu and Musco, arXiv 2506.11849, 2025) is the same scheme with linear or tree
regressions as g, found independently. The fit, and what is done below, is no paper's. Choices:

- *Kernels.* Membership + Gaussian in the averaging weights z / |S|, of four widths; membership + pairwise products +
  membership / |S|; membership: whichever of all those explains the sample best. Each part is scaled to unit variance
  over the sample.
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

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial

import torch
from torch import Generator, Tensor

from flsv.functional.shapley.game import ShapleyEstimate, Utility
from flsv.functional.shapley.layers import Layer, LayeredSample, estimate_in_stages, layer_variance
from flsv.functional.shapley.memoized_game import MemoizedGame
from flsv.functional.shapley.regression import centered, kernel_share
from flsv.utilities.declared import checked

_MAX_FIT = 1000  # coalitions; a fit of kernels costs the cube of their number

Kernel = Callable[[Tensor, Tensor, Tensor], Tensor]
"""``k(j, s, t)`` with j = |S n T|, s = |S|, t = |T|, float64 tensors that broadcast."""


def membership(j: Tensor, s: Tensor, t: Tensor) -> Tensor:
    """Compute the inner product of membership vectors: additive games."""
    return j + 0 * s


def pairs(j: Tensor, s: Tensor, t: Tensor) -> Tensor:
    """Compute the inner product of all products of two memberships: interactions of two players."""
    return j * (j - 1) / 2 + 0 * s


def averaged_membership(j: Tensor, s: Tensor, t: Tensor) -> Tensor:
    """Compute the inner product of membership / size: games that are linear in the average of the members' updates."""
    return torch.where(s * t > 0, j / (s * t).clamp_min(1), 0.0)


def gaussian(squared_width: float) -> Kernel:
    """Make the kernel exp(-|c_S - c_T|^2 / (2 w)) of the weight vectors c_S = z / |S| (0 for the empty coalition)."""

    def kernel(j: Tensor, s: Tensor, t: Tensor) -> Tensor:
        own = torch.where(s > 0, 1 / s.clamp_min(1), 0.0) + torch.where(t > 0, 1 / t.clamp_min(1), 0.0)
        return torch.exp(-(own - 2 * averaged_membership(j, s, t)) / (2 * squared_width))

    return kernel


def gram(kernel: Kernel, left: Tensor, right: Tensor) -> Tensor:
    """Compute ``k(S, T)`` for rows S of ``left`` bool ``[A, n]`` and T of ``right`` ``[B, n]``: float64 ``[A, B]``."""
    left, right = left.to(torch.float64), right.to(torch.float64)
    return kernel(left @ right.T, left.sum(dim=1, keepdim=True), right.sum(dim=1))


def kernel_shapley(kernel: Kernel, coalitions: Tensor) -> Tensor:
    """Compute exact Shapley values ``[B, n]`` of the games S -> k(S, T), T a row of ``coalitions`` bool ``[B, n]``.

    Example:
        The Shapley values of membership / |S| of player 0 among 3: H_3 / 3 and -(H_3 - 1) / 6.

        >>> kernel_shapley(averaged_membership, torch.tensor([[True, False, False]]))
        tensor([[ 0.6111, -0.1389, -0.1389]], dtype=torch.float64)
    """
    num_players = coalitions.shape[1]
    sizes = coalitions.sum(dim=1)
    inside, outside = torch.zeros(2, num_players + 1, dtype=torch.float64)
    s = torch.arange(num_players, dtype=torch.float64).view(-1, 1)
    for size in sizes.unique().tolist():
        t = torch.tensor(float(size), dtype=torch.float64)
        j = torch.arange(size + 1, dtype=torch.float64)
        here = kernel(j, s, t)
        if size < num_players:
            gain = kernel(j, s + 1, t) - here
            outside[size] = (_hypergeometric(num_players - 1, size, size) * gain).sum() / num_players
        if size > 0:
            gain = kernel(j + 1, s + 1, t) - here
            inside[size] = (_hypergeometric(num_players - 1, size - 1, size) * gain).sum() / num_players
    return torch.where(coalitions, inside[sizes].unsqueeze(1), outside[sizes].unsqueeze(1))


@lru_cache(maxsize=128)
def _hypergeometric(population: int, marked: int, most: int) -> Tensor:
    """Compute the probability of j <= ``most`` marked ones (column j) among s drawn of ``population`` (row s)."""
    drawn = torch.arange(population + 1, dtype=torch.float64).view(-1, 1)
    hits = torch.arange(most + 1, dtype=torch.float64)
    possible = (hits <= marked) & (hits <= drawn) & (drawn - hits <= population - marked)
    log_factorial = torch.lgamma(torch.arange(population + 1, dtype=torch.float64) + 1)

    def log_choose(n: int, k: Tensor) -> Tensor:
        k = k.clamp(0, n).long()
        return log_factorial[n] - log_factorial[k] - log_factorial[n - k]

    log_probability = (
        log_choose(marked, hits) + log_choose(population - marked, drawn - hits) - log_choose(population, drawn)
    )
    return torch.where(possible, log_probability.exp(), 0.0)


#: Candidates: the one that explains the sample best is taken.
SURROGATES: list[list[Kernel]] = [
    *([membership, gaussian(width)] for width in (0.1, 0.3, 1.0, 3.0)),
    [membership, pairs, averaged_membership],
    [membership],
]

PENALTIES = 10.0 ** torch.arange(-8, 2.5, 0.5, dtype=torch.float64)
CONSTANT = 100.0  # prior variance of the mean utility, in units of the sample's variance: vague


@dataclass
class Surrogate:
    """A fitted game g(S) = mean + sum_T a_T k(S, T)."""

    parts: list[tuple[Kernel, float]]
    coalitions: Tensor
    coefficients: Tensor
    offset: Tensor

    def __call__(self, masks: Tensor) -> Tensor:
        """Evaluate g, ``[K, M]``, on coalitions bool ``[K, n]``."""
        kernel = sum((scale * gram(part, masks, self.coalitions) for part, scale in self.parts), torch.zeros(()))
        return self.offset + kernel @ self.coefficients

    def shapley(self) -> Tensor:
        """Compute the exact Shapley values of g, ``[n, M]``."""
        values = sum((scale * kernel_shapley(part, self.coalitions) for part, scale in self.parts), torch.zeros(()))
        return values.T @ self.coefficients


def fit_surrogate(candidates: list[list[Kernel]], masks: Tensor, utilities: Tensor) -> tuple[Surrogate, Tensor]:
    """Fit the candidate and ridge penalty of largest marginal likelihood, with leave-one-out residuals.

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
        parts, matrix = [], torch.full((len(masks), len(masks)), CONSTANT, dtype=torch.float64)
        for kernel in kernels:
            part = gram(kernel, masks, masks)
            variance = (part.diagonal().mean() - part.mean()).clamp_min(1e-12)
            parts.append((kernel, 1 / float(variance)))
            matrix = matrix + part / variance
        eigenvalues, vectors = torch.linalg.eigh(matrix)
        eigenvalues = eigenvalues.clamp_min(0)
        shrunk = eigenvalues[None] + PENALTIES[:, None]
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
    return Surrogate(parts, masks, dual * finite, mean + CONSTANT * dual.sum(dim=0) * finite), left_out * finite


def _pair_terms(layer: Layer, residuals: Tensor) -> Tensor:
    r"""Compute the estimate ``[m, n, M]`` of SV(r) from each pair, with residuals r(S) - r(N \ S) ``[m, M]``."""
    return kernel_share(layer) * layer.masks.shape[1] / 2 * centered(layer).unsqueeze(-1) * residuals.unsqueeze(1)


@dataclass
class AdjustedEstimator:
    """An estimator of values and standard errors ``[n, M]`` from a game with utilities ``[M]`` and a paired sample.

    Args:
        fit: :func:`fit_surrogate` with bound candidates.
        folds: 1: residuals of the coalitions in the fit itself. More: residuals of one part of the pairs under a fit to
            the other parts, averaged.
    """

    fit: Callable[[Tensor, Tensor], tuple[Surrogate, Tensor]]
    folds: int

    def __call__(self, play: MemoizedGame, sample: LayeredSample) -> tuple[Tensor, Tensor]:
        layers, n = sample.layers, sample.num_players
        # An open layer has coalitions that were not drawn; only its pairs can be held out.
        open_sizes = [len(layer.masks) for layer in layers if len(layer.masks) < layer.capacity]
        folds = min([self.folds, *open_sizes]) if open_sizes else 1
        values, variance = torch.zeros(2, n, len(play.empty_and_grand()[0]), dtype=torch.float64)
        before = [torch.zeros(len(layer.masks), values.shape[1], dtype=torch.float64) for layer in layers]
        for fold in range(folds):
            fitted = [_fitted(layers, layer, fold, folds) for layer in layers]
            halves = torch.cat([layer.masks[index] for layer, index in zip(layers, fitted, strict=True)])
            ends = torch.arange(2)[:, None].expand(2, n).bool()
            masks = torch.cat([ends, halves, ~halves])
            game, left_out = self.fit(masks, play(masks))
            residual = play(ends) - game(ends)
            values = values + (game.shapley() + (residual[1] - residual[0]) / n) / folds
            left_out = (left_out[2 : 2 + len(halves)] - left_out[2 + len(halves) :]).split([len(i) for i in fitted])
            for k, layer in enumerate(layers):
                known = torch.zeros(len(layer.masks), dtype=torch.bool)
                known[fitted[k]] = True
                pair = play(layer.masks) - play(~layer.masks) - game(layer.masks) + game(~layer.masks)
                terms = _pair_terms(layer, pair)
                mean = terms.mean(dim=0)
                if folds > 1 and not bool(known.all()):
                    share = float(known.sum()) / layer.capacity
                    mean = share * terms[known].mean(dim=0) + (1 - share) * terms[~known].mean(dim=0)
                values = values + mean / folds
                if folds == 1:
                    before[k] = pair
                    before[k][fitted[k]] = left_out[k]
                elif len(layer.masks) < layer.capacity:
                    held_out = torch.arange(fold, len(layer.masks), folds)
                    before[k][held_out] = pair[held_out]
        for layer, pair in zip(layers, before, strict=True):
            count = len(layer.masks)
            terms = _pair_terms(layer, pair)
            influences = (terms - terms.mean(dim=0)) / (count * max(count - 1, 1)) ** 0.5
            variance = variance + layer_variance(layer, influences)
        return values, variance.sqrt()


def _fitted(layers: list[Layer], layer: Layer, fold: int, folds: int) -> Tensor:
    """Select the layer's pairs in the fit of this fold: all but every ``folds``-th, or a share of them if many."""
    index = torch.arange(len(layer.masks))
    if folds > 1 and len(index) < layer.capacity:
        index = index[index % folds != fold]
    total = 2 * sum(len(each.masks) for each in layers)
    return index[: max(2, round(len(index) * min(1.0, _MAX_FIT / total)))]


@checked
def surrogate_shapley(
    utility: Utility,
    num_players: int,
    *,
    unbiased: bool = False,
    budget: int | None = None,
    generator: Generator | None = None,
    target_stderr: float | None = None,
) -> ShapleyEstimate:
    """Estimate the Shapley value by that of a surrogate fitted to sampled coalitions, plus that of its residuals.

    Args:
        utility: ``masks: bool [K, n] -> float [K]`` or ``[K, M]``.
        num_players: n.
        unbiased: correct only by residuals of coalitions that the fit has not seen.
        budget: largest number of distinct evaluations, default 50 n. The minimum is all coalitions of size 1 and n - 1
            and two pairs of every other size, 4 n - 2 for even n and 4 n - 4 for odd n.
        generator: source of the coalitions.
        target_stderr: stop as soon as every standard error is at most this, in the utility's unit.

    Returns:
        ``values`` and ``stderr`` ``[n]`` or ``[n, M]``; exact, stderr 0, where the budget buys all coalitions.

    Raises:
        ConfigurationError: a budget below the minimum, which is named.
        ValueError: a utility that is NaN, infinite or of the wrong shape.

    Example:
        A coalition averages its members' updates; its loss is quadratic in the average.

        >>> updates = torch.linspace(-1, 2, 12, dtype=torch.float64)
        >>> from flsv.functional import exact_shapley
        >>> loss = lambda masks: (masks @ updates / masks.sum(dim=1).clamp_min(1) - 1) ** 2
        >>> utility = lambda masks: -loss(masks.double())
        >>> sampled = surrogate_shapley(utility, 12, budget=100, generator=torch.Generator().manual_seed(0))
        >>> (sampled.values - exact_shapley(utility, 12).values).abs().max() < 0.01
        tensor(True)
    """
    sample = LayeredSample(num_players, paired=True, generator=generator)
    estimator = AdjustedEstimator(partial(fit_surrogate, SURROGATES), 5 if unbiased else 1)
    return estimate_in_stages("surrogate_shapley", utility, sample, budget, target_stderr, estimator)
