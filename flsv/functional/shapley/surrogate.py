"""Shapley values by a surrogate game fitted to sampled coalitions, and a correction by its residuals."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from operator import itemgetter

import torch
from torch import Generator, Tensor

from flsv.functional.shapley.game import MemoizedGame, ShapleyEstimate, Utility
from flsv.functional.shapley.stratified import Layer, LayeredSample, estimate_by_size, layer_variance
from flsv.utilities.declared import checked

Kernel = Callable[[Tensor, Tensor, Tensor], Tensor]
"""A kernel ``k(j, s, t)`` of two coalitions S and T, with j = |S n T|, s = |S|, t = |T|, float64 tensors that
broadcast."""


def membership(j: Tensor, s: Tensor, t: Tensor) -> Tensor:
    """Return the kernel of additive games."""
    return j + 0 * s


def pairs(j: Tensor, s: Tensor, t: Tensor) -> Tensor:
    """Return the kernel of games with interactions of two players."""
    return j * (j - 1) / 2 + 0 * s


def averaged_membership(j: Tensor, s: Tensor, t: Tensor) -> Tensor:
    """Return the kernel of games that are linear in the average update. 0 if a coalition is empty."""
    return torch.where(s * t > 0, j / (s * t).clamp_min(1), 0.0)


def gaussian(squared_width: float) -> Kernel:
    """Return the Gaussian kernel exp(-|c_S - c_T|^2 / (2 w)) of averaging weights c_S = z / |S|, 0 if empty."""

    def kernel(j: Tensor, s: Tensor, t: Tensor) -> Tensor:
        own = torch.where(s > 0, 1 / s.clamp_min(1), 0.0) + torch.where(t > 0, 1 / t.clamp_min(1), 0.0)
        return torch.exp(-(own - 2 * averaged_membership(j, s, t)) / (2 * squared_width))

    return kernel


def gram(kernel: Kernel, left: Tensor, right: Tensor) -> Tensor:
    """Compute a kernel's matrix ``[A, B]`` between coalitions ``[A, n]`` and ``[B, n]``."""
    left, right = left.to(torch.float64), right.to(torch.float64)
    return kernel(left @ right.T, left.sum(dim=1, keepdim=True), right.sum(dim=1))


def kernel_shapley(kernel: Kernel, coalitions: Tensor) -> Tensor:
    """Compute exact Shapley values ``[B, n]`` of the games S -> k(S, T), for coalitions T ``[B, n]``."""
    # k depends only on j = |S n T|, s and t, so that all members of T have one value, and all others one. A player's
    # predecessors in a random order are a uniform coalition of uniform size s, and j of them in T is hypergeometric:
    #  inside(t) = 1/n sum_s sum_j C(t-1, j) C(n-t, s-j) / C(n-1, s) [k(j+1, s+1, t) - k(j, s, t)]
    #  outside(t) = 1/n sum_s sum_j C(t, j) C(n-1-t, s-j) / C(n-1, s) [k(j, s+1, t) - k(j, s, t)]
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
    """Compute the probabilities of the hypergeometric distribution."""
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


def centered(layer: Layer) -> Tensor:
    """Return the drawn membership vectors minus s/n, float64 ``[m, n]``."""
    return layer.masks.to(torch.float64) - layer.size / layer.masks.shape[1]


def kernel_share(layer: Layer) -> float:
    """Compute a layer's total weight in the Shapley kernel, divided by n - 1."""
    # The weight is 1 / (s (n - s)) for a size s, twice that for a layer of two sizes (Lundberg and Lee, NeurIPS
    # 2017).
    return layer.sizes / (layer.size * (layer.masks.shape[1] - layer.size))


_MAX_FIT = 1000  # coalitions in a fit, whose time grows with the cube of their number

#: The candidate kernels, each a list of kernels to sum; :func:`fit_surrogate` takes that of the largest likelihood.
SURROGATES: list[list[Kernel]] = [
    *([membership, gaussian(width)] for width in (0.1, 0.3, 1.0, 3.0)),
    [membership, pairs, averaged_membership],
    [membership],
]

PENALTIES = 10.0 ** torch.arange(-8, 2.5, 0.5, dtype=torch.float64)
CONSTANT = 100.0  # prior variance of the mean utility, in units of the sample's variance: a vague prior


@dataclass
class Surrogate:
    """Game g(S) = offset + sum_T a_T k(S, T), fitted to the utilities of coalitions T."""

    parts: list[tuple[Kernel, float]]
    coalitions: Tensor
    coefficients: Tensor
    offset: Tensor

    def __call__(self, masks: Tensor) -> Tensor:
        """Compute the fitted utilities ``[K, M]`` of masks ``[K, n]``."""
        kernel = sum((scale * gram(part, masks, self.coalitions) for part, scale in self.parts), torch.zeros(()))
        return self.offset + kernel @ self.coefficients

    def shapley(self) -> Tensor:
        """Compute the fitted game's exact Shapley values ``[n, M]``."""
        values = sum((scale * kernel_shapley(part, self.coalitions) for part, scale in self.parts), torch.zeros(()))
        return values.T @ self.coefficients


def fit_surrogate(candidates: list[list[Kernel]], masks: Tensor, utilities: Tensor) -> tuple[Surrogate, Tensor]:
    """Fit the kernel and penalty of the largest marginal likelihood. Return leave-one-out residuals ``[m, M]``, too."""
    mean, scale = utilities.mean(dim=0), utilities.std(dim=0)
    scale = torch.where(scale > 1e-12 * (1 + mean.abs()), scale, torch.inf)  # a constant column is all mean
    y = (utilities - mean) / scale
    _, parts, vectors, spectrum = min((_ridge(kernels, masks, y) for kernels in candidates), key=itemgetter(0))
    dual = vectors @ ((vectors.T @ y) / spectrum.unsqueeze(1))
    left_out = dual / (vectors.square() / spectrum).sum(dim=1, keepdim=True)
    finite = torch.where(scale.isinf(), 0, scale)
    return Surrogate(parts, masks, dual * finite, mean + CONSTANT * dual.sum(dim=0) * finite), left_out * finite


def _ridge(kernels: list[Kernel], masks: Tensor, y: Tensor) -> tuple[float, list[tuple[Kernel, float]], Tensor, Tensor]:
    """Choose the ridge penalty of the largest marginal likelihood for one kernel."""
    parts, matrix = [], torch.full((len(masks), len(masks)), CONSTANT, dtype=torch.float64)
    for kernel in kernels:
        part = gram(kernel, masks, masks)
        variance = (part.diagonal().mean() - part.mean()).clamp_min(1e-12)
        parts.append((kernel, 1 / float(variance)))
        matrix = matrix + part / variance
    eigenvalues, vectors = torch.linalg.eigh(matrix)
    shrunk = eigenvalues.clamp_min(0)[None] + PENALTIES[:, None]
    power = ((vectors.T @ y).square()[None] / shrunk[..., None]).mean(dim=1).clamp_min(1e-12)
    loss = power.log().mean(dim=1) + shrunk.log().mean(dim=1)
    at = int(loss.argmin())
    return float(loss[at]), parts, vectors, shrunk[at]


def _pair_terms(layer: Layer, residuals: Tensor) -> Tensor:
    """Estimate the values ``[m, n, M]`` of the residual game from each pair of complements alone."""
    return kernel_share(layer) * layer.masks.shape[1] / 2 * centered(layer).unsqueeze(-1) * residuals.unsqueeze(1)


@dataclass
class AdjustedEstimator:
    """Shapley values from a paired sample, by a surrogate and its residuals."""

    # SV(U) = SV(g) + SV(U - g). SV(g) is exact, and with r = U - g and V = r(N) - r(empty)
    #  SV_i(r) = V/n + n sum_{s=1..n-1} 1/(s (n - s)) E_{|S|=s}[ r(S) (z_i - s/n) ],
    #  KernelSHAP with the expectation of its matrix in place of the sampled one, which makes it unbiased (Witter, Liu
    # and Musco, arXiv 2506.11849, 2025, found the scheme independently). One fold: fit to all pairs, and correct by
    # their residuals, which biases towards the surrogate. More: cross-fitting without one fold's pairs.

    # One fold: fit to all pairs, and correct by their residuals. More: cross-fitting without one fold's pairs.

    fit: Callable[[Tensor, Tensor], tuple[Surrogate, Tensor]]
    folds: int

    def __call__(self, play: MemoizedGame, sample: LayeredSample) -> tuple[Tensor, Tensor]:
        layers, n = sample.layers, sample.num_players
        # Only pairs of layers that are not completely drawn are held out.
        open_sizes = [len(layer.masks) for layer in layers if len(layer.masks) < layer.capacity]
        folds = min([self.folds, *open_sizes]) if open_sizes else 1
        ends = torch.arange(2)[:, None].expand(2, n).bool()
        values = torch.zeros(n, len(play.empty_and_grand()[0]), dtype=torch.float64)
        # Of each pair, by a fit without it.
        residuals = [torch.zeros(len(layer.masks), values.shape[1], dtype=torch.float64) for layer in layers]
        for fold in range(folds):
            fitted = [_fitted(layers, layer, fold, folds) for layer in layers]
            halves = torch.cat([layer.masks[index] for layer, index in zip(layers, fitted, strict=True)])
            masks = torch.cat([ends, halves, ~halves])
            game, left_out = self.fit(masks, play(masks))
            gap = play(ends) - game(ends)
            values = values + (game.shapley() + (gap[1] - gap[0]) / n) / folds
            left_out = (left_out[2 : 2 + len(halves)] - left_out[2 + len(halves) :]).split([len(i) for i in fitted])
            for k, (layer, known) in enumerate(zip(layers, fitted, strict=True)):
                of_pairs = play(layer.masks) - play(~layer.masks) - game(layer.masks) + game(~layer.masks)
                values = values + _layer_values(layer, of_pairs, known if folds > 1 else None) / folds
                if folds == 1:
                    residuals[k] = of_pairs
                    residuals[k][known] = left_out[k]
                elif len(layer.masks) < layer.capacity:
                    residuals[k][fold::folds] = of_pairs[fold::folds]
        return values, _stderr(layers, residuals)


def _layer_values(layer: Layer, residuals: Tensor, known: Tensor | None) -> Tensor:
    """Estimate what a layer adds to the residual game's values ``[n, M]``."""
    terms = _pair_terms(layer, residuals)
    if known is None or len(known) == len(terms):
        return terms.mean(dim=0)
    inside = torch.zeros(len(terms), dtype=torch.bool)
    inside[known] = True
    share = len(known) / layer.capacity
    return share * terms[inside].mean(dim=0) + (1 - share) * terms[~inside].mean(dim=0)


def _stderr(layers: list[Layer], residuals: list[Tensor]) -> Tensor:
    """Estimate the standard errors ``[n, M]`` from the residuals ``[m, M]`` of each layer's pairs."""
    # With unbiased=True they are within some 25 % of the spread. By default 1 to 1.8 times it, except on very smooth
    # games (0.6 times), without the bias: docs/results/intervals.csv.
    variance = torch.zeros(())
    for layer, of_pairs in zip(layers, residuals, strict=True):
        terms, count = _pair_terms(layer, of_pairs), len(layer.masks)
        influences = (terms - terms.mean(dim=0)) / (count * max(count - 1, 1)) ** 0.5
        variance = variance + layer_variance(layer, influences)
    return variance.sqrt()


def _fitted(layers: list[Layer], layer: Layer, fold: int, folds: int) -> Tensor:
    """Select the positions of a layer's pairs to which one fold's surrogate is fitted."""
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
) -> ShapleyEstimate:
    """Estimate the Shapley value by a fitted surrogate game, plus a correction.

    The surrogate is a kernel ridge regression with an exact Shapley value. The correction is the Shapley value of its
    residuals, the differences between the utilities and the surrogate, estimated from the sampled coalitions.

    Args:
        utility: the game, from masks bool ``[K, n]`` to utilities ``[K]``, or ``[K, M]`` for M games at once.
        num_players: the number n of players.
        unbiased: whether to estimate the correction only from coalitions that were held out of the fit (cross-fitting
            in five folds), not from all sampled coalitions. This removes the bias, and usually increases the error.
        budget: largest number of distinct evaluations. None: 50 n. The minimum is all
            coalitions of size 1 and n - 1 and two pairs of every other size, 4 n - 2 for even n and 4 n - 4 for odd n.
        generator: the random generator that draws the coalitions. None: torch's default.

    Returns:
        The estimate: ``values`` and ``stderr``, ``[n]`` or ``[n, M]``. The values are exact, with stderr 0, if the
        budget suffices for all coalitions.

    Raises:
        ConfigurationError: the budget is below the minimum, which the message names, or there is no player.
        ValueError: a utility is NaN or infinite, or ``utility`` returns a wrong shape.

    Example:
        A coalition averages its members' updates. Its loss is quadratic in the average.

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
    return estimate_by_size("surrogate_shapley", utility, sample, budget, estimator)
