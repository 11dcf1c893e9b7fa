r"""Shapley values by a surrogate: a game fitted to sampled coalitions, and a correction by its residuals.

**Surrogates.** A kernel-ridge (Gaussian process) fit of a game is g(S) = sum_T a_T k(S, T) over the evaluated
coalitions T. The Shapley value is linear, so that the value of g follows from the values of the games S -> k(S, T). Let
n be the number of players. If k(S, T) = k(j, s, t) depends only on j = |S n T|, s = |S| and t = |T|, all members of T
have the same value in the game S -> k(S, T), and so have all other players. The predecessors of a player in a random
order are a uniform coalition of uniform size s, and the number j of them in T is hypergeometric. The two values are

    inside(t)  = 1/n sum_{s=0..n-1} sum_j  C(t-1, j) C(n-t, s-j) / C(n-1, s)    [k(j+1, s+1, t) - k(j, s, t)]
    outside(t) = 1/n sum_{s=0..n-1} sum_j  C(t, j)   C(n-1-t, s-j) / C(n-1, s)  [k(j,   s+1, t) - k(j, s, t)]

with C(a, b) the binomial coefficient. They are exact for any such k, cost n^2 operations per t and need no evaluation
of a coalition. Ridge regression on explicit features is the special case in which k is the features' inner product
(z_i is 1 if player i is in S, otherwise 0):

- membership z_i: k = j. The feature z_i has the value 1 for player i and 0 for the others.
- pairwise products z_i z_l: k = j (j - 1) / 2. The feature has the value 1/2 for each of the players i and l.
- membership / |S|, the linear term of a game whose coalitions *average* their members' updates: k = j / (s t). On
  joining s others, player i adds 1 / (s + 1) to its feature z_i / |S|, and every later player reduces the feature. It
  has the value  E[1/(s+1)] = H_n / n  for player i (H_n the harmonic number), and by efficiency
  (1/n - H_n/n) / (n - 1) = -(H_n - 1) / (n (n - 1))  for every other player.

The Gaussian kernel contains products of these averages of every order. A coalition's model is x + mean_{i in S} d_i,
with x the global model and d_i the clients' updates: a function of the weight vector c_S = z / |S|. Coalitions with
close weight vectors have close utilities, and |c_S - c_T|^2 = 1/s + 1/t - 2 j / (s t).

**Surrogate-adjusted sampling.** For any game g, the Shapley value SV of the game U is

    SV(U) = SV(g) + SV(U - g).

g is fitted to the sampled coalitions by kernel ridge regression, and SV(g) is exact (:func:`kernel_shapley`). The value
of the residual game r = U - g is estimated from the same evaluations, without a further fit. With V = r(N) - r(empty)
and N the grand coalition,

    SV_i(r) = V/n + n sum_{s=1..n-1} 1/(s (n - s)) E_{|S|=s}[ r(S) (z_i - s/n) ].

This is KernelSHAP with the expectation of its matrix (a multiple of the centering matrix) in place of the sampled
matrix, which makes it unbiased, and is also maximum sample reuse (Witter, Liu and Musco 2025). S and its complement
together contribute (r(S) - r(N \ S)) (z_i - s/n). Coalitions are drawn in pairs, by size and without replacement, see
:mod:`flsv.functional.shapley.layers`.

Regression-adjusted Monte Carlo (Witter, Liu and Musco, arXiv 2506.11849, 2025) is the same scheme with linear or tree
regressions as g, found independently. The fit and the following choices are this package's own:

- *Kernels.* Membership plus a Gaussian kernel on z / |S|, with one of four widths; membership plus pairwise products
  plus membership / |S|; or membership alone. Each part of a sum is scaled to unit variance over the sample.
- *Kernel and ridge penalty* maximize the marginal likelihood, with one choice for all columns of a vector-valued game.
  No evaluations are set aside for the choice.
- *Bias.* By default g is fitted to the same coalitions whose residuals correct it. This shrinks the residuals: the
  estimate is biased towards the surrogate's value, but closer to the truth. ``unbiased=True`` fits on all folds but one
  and corrects by the residuals of that fold, averaged over five folds; coalitions in the fit enter with their known
  residuals, so that only the residuals of coalitions that were never evaluated are extrapolated.
- *Standard error*: the sampling variance by size of the residuals, where each coalition's residual is taken from a fit
  without it (leave-one-out residuals in closed form, or the held-out fold's). With ``unbiased=True`` it is within some
  25 % of the estimates' spread. By default it is 1 to 1.8 times the spread, except on very smooth games, where it can
  be too small (0.6 times). It does *not* include the bias: ``docs/results/intervals.md`` has how often 90 % intervals
  made of it contain the value.
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

_MAX_FIT = 1000  # coalitions in a fit, whose time grows with the cube of their number

Kernel = Callable[[Tensor, Tensor, Tensor], Tensor]
"""A kernel ``k(j, s, t)`` of two coalitions S and T, with j = |S n T|, s = |S|, t = |T|, float64 tensors that
broadcast."""


def membership(j: Tensor, s: Tensor, t: Tensor) -> Tensor:
    """Compute the kernel of additive games: the inner product of two coalitions' membership vectors.

    Args:
        j: the number of players in both coalitions.
        s: the size of the first coalition.
        t: the size of the second coalition.
    """
    return j + 0 * s


def pairs(j: Tensor, s: Tensor, t: Tensor) -> Tensor:
    """Compute the kernel of games with interactions of two players: how many pairs of players two coalitions share.

    Args:
        j: the number of players in both coalitions.
        s: the size of the first coalition.
        t: the size of the second coalition.
    """
    return j * (j - 1) / 2 + 0 * s


def averaged_membership(j: Tensor, s: Tensor, t: Tensor) -> Tensor:
    """Compute the kernel of games that are linear in the mean of the members' updates.

    It is the inner product of two coalitions' membership vectors divided by their sizes; 0 for the empty coalition.

    Args:
        j: the number of players in both coalitions.
        s: the size of the first coalition.
        t: the size of the second coalition.
    """
    return torch.where(s * t > 0, j / (s * t).clamp_min(1), 0.0)


def gaussian(squared_width: float) -> Kernel:
    """Return the Gaussian kernel exp(-|c_S - c_T|^2 / (2 w)) of two coalitions S and T, with w = ``squared_width``.

    c_S is the membership vector of S divided by |S|, the weights with which S averages its members' updates; it is 0
    for the empty coalition.
    """

    def kernel(j: Tensor, s: Tensor, t: Tensor) -> Tensor:
        own = torch.where(s > 0, 1 / s.clamp_min(1), 0.0) + torch.where(t > 0, 1 / t.clamp_min(1), 0.0)
        return torch.exp(-(own - 2 * averaged_membership(j, s, t)) / (2 * squared_width))

    return kernel


def gram(kernel: Kernel, left: Tensor, right: Tensor) -> Tensor:
    """Compute a kernel's matrix between two lists of coalitions.

    Args:
        kernel: the kernel k.
        left: the coalitions S, bool ``[A, n]``.
        right: the coalitions T, bool ``[B, n]``.

    Returns:
        float64 ``[A, B]``, k(S, T) for each S and T.
    """
    left, right = left.to(torch.float64), right.to(torch.float64)
    return kernel(left @ right.T, left.sum(dim=1, keepdim=True), right.sum(dim=1))


def kernel_shapley(kernel: Kernel, coalitions: Tensor) -> Tensor:
    """Compute exact Shapley values of the games S -> k(S, T), one game for each coalition T.

    Args:
        kernel: the kernel k.
        coalitions: the coalitions T, bool ``[B, n]``.

    Returns:
        float64 ``[B, n]``, each player's value in each of the B games.

    Example:
        The game S -> [player 0 is in S] / |S| of three players.

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
    """Compute the probabilities of the hypergeometric distribution.

    Args:
        population: how many items there are.
        marked: how many of the items are marked.
        most: the largest number of marked items to list.

    Returns:
        float64 ``[population + 1, most + 1]``; row s, column j: the probability that j of s drawn items are marked.
    """
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


#: The candidate kernels, each as the parts of a sum; :func:`fit_surrogate` takes the one of largest likelihood.
SURROGATES: list[list[Kernel]] = [
    *([membership, gaussian(width)] for width in (0.1, 0.3, 1.0, 3.0)),
    [membership, pairs, averaged_membership],
    [membership],
]

PENALTIES = 10.0 ** torch.arange(-8, 2.5, 0.5, dtype=torch.float64)
CONSTANT = 100.0  # prior variance of the mean utility, in units of the sample's variance: vague


@dataclass
class Surrogate:
    """A fitted game g(S) = offset + sum_T a_T k(S, T).

    Attributes:
        parts: the kernels whose weighted sum is k, each with its weight.
        coalitions: the coalitions T of the fit, bool ``[m, n]``.
        coefficients: a_T, float64 ``[m, M]``.
        offset: ``[M]``, added to every utility.
    """

    parts: list[tuple[Kernel, float]]
    coalitions: Tensor
    coefficients: Tensor
    offset: Tensor

    def __call__(self, masks: Tensor) -> Tensor:
        """Compute the fitted utilities ``[K, M]`` of coalitions bool ``[K, n]``."""
        kernel = sum((scale * gram(part, masks, self.coalitions) for part, scale in self.parts), torch.zeros(()))
        return self.offset + kernel @ self.coefficients

    def shapley(self) -> Tensor:
        """Compute the exact Shapley values ``[n, M]`` of the fitted game."""
        values = sum((scale * kernel_shapley(part, self.coalitions) for part, scale in self.parts), torch.zeros(()))
        return values.T @ self.coefficients


def fit_surrogate(candidates: list[list[Kernel]], masks: Tensor, utilities: Tensor) -> tuple[Surrogate, Tensor]:
    """Fit a surrogate game, with the candidate kernel and ridge penalty of the largest marginal likelihood.

    Args:
        candidates: the kernels to choose from, each as the list of the parts of its sum.
        masks: the m coalitions to fit, bool ``[m, n]``, distinct.
        utilities: the coalitions' utilities, float64 ``[m, M]``.

    Returns:
        The surrogate, and the leave-one-out residuals ``[m, M]``: each coalition's utility minus its prediction from
        all other coalitions.
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
    r"""Estimate the Shapley values of the residual game from each pair of complementary coalitions.

    Args:
        layer: a layer of m pairs.
        residuals: ``[m, M]``, the residual r(S) of a coalition minus r(N \ S) of its complement.

    Returns:
        ``[m, n, M]``, the layer's part of the Shapley values as each pair estimates it.
    """
    return kernel_share(layer) * layer.masks.shape[1] / 2 * centered(layer).unsqueeze(-1) * residuals.unsqueeze(1)


@dataclass
class AdjustedEstimator:
    """An estimator of Shapley values from a sample of complementary pairs, by a surrogate and its residuals.

    It is called with a memoized game and a paired sample, and returns values and standard errors, both ``[n, M]``.

    Args:
        fit: :func:`fit_surrogate` with its candidates bound.
        folds: 1: correct by the residuals of the coalitions in the fit. More: cross-fitting; the pairs of each fold are
            held out of a fit and correct it, and the results are averaged over the folds.
    """

    fit: Callable[[Tensor, Tensor], tuple[Surrogate, Tensor]]
    folds: int

    def __call__(self, play: MemoizedGame, sample: LayeredSample) -> tuple[Tensor, Tensor]:
        layers, n = sample.layers, sample.num_players
        # Only pairs of layers that are not completely drawn are held out.
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
    """Select the pairs of a layer that enter the fit of one fold.

    Args:
        layers: all layers of the sample.
        layer: the layer to select from.
        fold: the number of the fold, from 0.
        folds: how many folds there are.

    Returns:
        int ``[p]``, the selected pairs' positions in the layer. A completely drawn layer enters every fit; a sample
        larger than ``_MAX_FIT`` is thinned.
    """
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
    """Estimate the Shapley value as that of a surrogate game fitted to sampled coalitions, plus that of its residuals.

    Args:
        utility: the game: a function from K coalitions (masks, bool ``[K, n]``) to their utilities, float ``[K]``, or
            ``[K, M]`` for M games at once.
        num_players: the number n of players.
        unbiased: correct only by the residuals of coalitions that are held out of the fit.
        budget: largest number of distinct evaluations, default 50 n. The minimum is all coalitions of size 1 and n - 1
            and two pairs of every other size, 4 n - 2 for even n and 4 n - 4 for odd n.
        generator: the random generator that draws the coalitions; None: torch's default.
        target_stderr: stop as soon as every standard error is at most this number, in the utility's unit.

    Returns:
        The estimate: ``values`` and ``stderr``, ``[n]`` or ``[n, M]``. The values are exact, with stderr 0, if the
        budget suffices for all coalitions, unless ``target_stderr`` is reached before.

    Raises:
        ConfigurationError: the budget is below the minimum, which the message names; ``target_stderr`` is not above 0;
            or there is no player.
        ValueError: a utility is NaN or infinite, or ``utility`` returns a wrong shape.

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
