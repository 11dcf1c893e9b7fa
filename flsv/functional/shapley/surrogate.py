"""Shapley values by a surrogate game fitted to sampled coalitions, and a correction by its residuals."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache, partial
from operator import itemgetter

import torch
from torch import Generator, Tensor

from flsv.functional.shapley.exact import exact_shapley
from flsv.functional.shapley.game import (
    MemoizedGame,
    Sampling,
    ShapleyEstimate,
    Utility,
    coalition_keys,
)
from flsv.functional.shapley.permutation import random_coalitions

Kernel = Callable[[Tensor, Tensor, Tensor], Tensor]
"""A kernel ``k(j, s, t)`` of two coalitions S and T, with j = |S n T|, s = |S|, t = |T|, float64 tensors that
broadcast."""


def membership(j: Tensor, s: Tensor, t: Tensor) -> Tensor:
    """Return the kernel j between coalitions S and T, for additive games. j is |S n T|, s is |S|, t is |T|."""
    return j + 0 * s


def pairs(j: Tensor, s: Tensor, t: Tensor) -> Tensor:
    """Return the kernel j (j - 1) / 2 between coalitions S and T. It is for games with interactions of two players. j
    is |S n T|, s is |S|, t is |T|.
    """
    return j * (j - 1) / 2 + 0 * s


def averaged_membership(j: Tensor, s: Tensor, t: Tensor) -> Tensor:
    """Return the kernel j / (s t) between coalitions S and T, or 0 if one is empty. It is for games that are linear in
    the average update. j is |S n T|, s is |S|, t is |T|.
    """
    return torch.where(s * t > 0, j / (s * t).clamp_min(1), 0.0)


def gaussian(squared_width: float) -> Kernel:
    """Return the Gaussian kernel exp(-|c_S - c_T|^2 / (2 w)) with the squared width w. Here c_S = z / |S|, with z the
    membership vector of coalition S, and c_S = 0 if S is empty.
    """

    def kernel(j: Tensor, s: Tensor, t: Tensor) -> Tensor:
        own = torch.where(s > 0, 1 / s.clamp_min(1), 0.0) + torch.where(
            t > 0, 1 / t.clamp_min(1), 0.0
        )
        return torch.exp(-(own - 2 * averaged_membership(j, s, t)) / (2 * squared_width))

    return kernel


def gram(kernel: Kernel, left: Tensor, right: Tensor) -> Tensor:
    """Compute the kernel matrix ``[A, B]`` between coalitions ``left [A, n]`` and ``right [B, n]``."""
    left, right = left.to(torch.float64), right.to(torch.float64)
    return kernel(left @ right.T, left.sum(dim=1, keepdim=True), right.sum(dim=1))


def kernel_shapley(kernel: Kernel, coalitions: Tensor) -> Tensor:
    """Compute exact Shapley values ``[B, n]`` of the games S -> k(S, T). There is one game for each T in
    ``coalitions [B, n]``.
    """
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
            outside[size] = (
                _hypergeometric(num_players - 1, size, size) * gain
            ).sum() / num_players
        if size > 0:
            gain = kernel(j + 1, s + 1, t) - here
            inside[size] = (
                _hypergeometric(num_players - 1, size - 1, size) * gain
            ).sum() / num_players
    return torch.where(coalitions, inside[sizes].unsqueeze(1), outside[sizes].unsqueeze(1))


@lru_cache(maxsize=128)
def _hypergeometric(population: int, marked: int, most: int) -> Tensor:
    """Compute hypergeometric probabilities ``[population + 1, most + 1]``. Entry (d, h) is that of h ``marked``
    elements among d drawn ones.
    """
    drawn = torch.arange(population + 1, dtype=torch.float64).view(-1, 1)
    hits = torch.arange(most + 1, dtype=torch.float64)
    possible = (hits <= marked) & (hits <= drawn) & (drawn - hits <= population - marked)
    log_factorial = torch.lgamma(torch.arange(population + 1, dtype=torch.float64) + 1)

    def log_choose(n: int, k: Tensor) -> Tensor:
        k = k.clamp(0, n).long()
        return log_factorial[n] - log_factorial[k] - log_factorial[n - k]

    log_probability = (
        log_choose(marked, hits)
        + log_choose(population - marked, drawn - hits)
        - log_choose(population, drawn)
    )
    return torch.where(possible, log_probability.exp(), 0.0)


@dataclass
class Layer:
    """Sampled pairs of a coalition of the given ``size`` and its complement."""

    # ``masks [m, n]`` are the drawn halves of size s, or with player 0, of ``capacity``. ``sizes`` is 2 if the halves
    # differ in size.

    size: int
    capacity: int
    minimum: int
    sizes: int
    masks: Tensor
    seen: set[int | bytes] = field(default_factory=set)


class PairedSample:
    """Random sample of distinct pairs of complementary coalitions, drawn by size without replacement."""

    # The pairs of sizes 1 and n - 1 are always drawn completely: they weigh most in the Shapley kernel.

    def __init__(self, num_players: int, generator: Generator | None = None) -> None:
        self.num_players, self.generator = num_players, generator
        self.layers: list[Layer] = []
        for size in range(1, num_players // 2 + 1):
            middle = 2 * size == num_players
            capacity = math.comb(num_players, size) // (2 if middle else 1)
            minimum = min(num_players if size == 1 else 2, capacity)
            empty = torch.empty(0, num_players, dtype=torch.bool)
            self.layers.append(Layer(size, capacity, minimum, 1 if middle else 2, empty))
        self.minimum = sum(layer.minimum for layer in self.layers)
        self.capacity = sum(layer.capacity for layer in self.layers)

    def draw(self, total: int) -> None:
        """Draw ``total`` pairs. The numbers per size are optimal if utilities have the same variance at all sizes."""
        # With m draws a layer adds 1 / (s (n - s) m) to the variance.
        n = self.num_players
        counts = [layer.minimum for layer in self.layers]
        share = [layer.sizes / math.sqrt(layer.size * (n - layer.size)) for layer in self.layers]
        heap = [
            ((counts[k] + 1) / share[k], k)
            for k in range(len(counts))
            if counts[k] < self.layers[k].capacity
        ]
        heapq.heapify(heap)
        for _ in range(min(total, self.capacity) - sum(counts)):
            _, k = heapq.heappop(heap)
            counts[k] += 1
            if counts[k] < self.layers[k].capacity:
                heapq.heappush(heap, ((counts[k] + 1) / share[k], k))
        for layer, count in zip(self.layers, counts, strict=True):
            if count == layer.capacity:
                members = torch.tensor(list(itertools.combinations(range(n), layer.size)))
                members = members[torch.randperm(len(members), generator=self.generator)]
                everything = torch.zeros(len(members), n, dtype=torch.bool).scatter_(
                    1, members, True
                )
                self._add(layer, everything, count)
            while len(layer.masks) < count:
                sizes = torch.full((count - len(layer.masks) + 4,), layer.size)
                self._add(layer, random_coalitions(sizes, n, self.generator), count)

    def _add(self, layer: Layer, masks: Tensor, count: int) -> None:
        """Add new coalitions to a layer until it has ``count``."""
        if 2 * layer.size == self.num_players:
            masks = masks ^ ~masks[:, :1]
        new = []
        for position, key in enumerate(coalition_keys(masks)):
            if key not in layer.seen and len(layer.seen) < count:
                layer.seen.add(key)
                new.append(position)
        layer.masks = torch.cat([layer.masks, masks[new]])


_MAX_FIT = 1000  # coalitions in a fit, whose time grows with the cube of their number

#: The candidate kernels, each a list of kernels to sum; :func:`fit_surrogate` takes that of the largest likelihood.
SURROGATES: list[list[Kernel]] = [
    *([membership, gaussian(width)] for width in (0.1, 0.3, 1.0, 3.0)),
    [membership, pairs, averaged_membership],
    [membership],
]

PENALTIES = 10.0 ** torch.arange(-8, 2.5, 0.5, dtype=torch.float64)
CONSTANT = (
    100.0  # prior variance of the mean utility, in units of the sample's variance: a vague prior
)


@dataclass
class Surrogate:
    """Game g(S) = offset + sum_T a_T k(S, T), fitted to the utilities of coalitions T."""

    parts: list[tuple[Kernel, float]]
    coalitions: Tensor
    coefficients: Tensor
    offset: Tensor

    def __call__(self, masks: Tensor) -> Tensor:
        """Compute the fitted utilities ``[K, M]`` of masks ``[K, n]``."""
        kernel = sum(
            (scale * gram(part, masks, self.coalitions) for part, scale in self.parts),
            torch.zeros(()),
        )
        return self.offset + kernel @ self.coefficients

    def shapley(self) -> Tensor:
        """Compute the fitted game's exact Shapley values ``[n, M]``."""
        values = sum(
            (scale * kernel_shapley(part, self.coalitions) for part, scale in self.parts),
            torch.zeros(()),
        )
        return values.T @ self.coefficients


def fit_surrogate(
    candidates: list[list[Kernel]], masks: Tensor, utilities: Tensor
) -> tuple[Surrogate, Tensor]:
    """Fit a surrogate by kernel ridge regression, and return it with the leave-one-out residuals ``[m, M]``.

    Its kernel is a sum of kernels, one of ``candidates``. This and the ridge penalty maximize the marginal likelihood.
    """
    mean, scale = utilities.mean(dim=0), utilities.std(dim=0)
    scale = torch.where(
        scale > 1e-12 * (1 + mean.abs()), scale, torch.inf
    )  # a constant column is all mean
    y = (utilities - mean) / scale
    _, parts, vectors, spectrum = min(
        (_ridge(kernels, masks, y) for kernels in candidates), key=itemgetter(0)
    )
    dual = vectors @ ((vectors.T @ y) / spectrum.unsqueeze(1))
    left_out = dual / (vectors.square() / spectrum).sum(dim=1, keepdim=True)
    finite = torch.where(scale.isinf(), 0, scale)
    return Surrogate(
        parts, masks, dual * finite, mean + CONSTANT * dual.sum(dim=0) * finite
    ), left_out * finite


def _ridge(
    kernels: list[Kernel], masks: Tensor, y: Tensor
) -> tuple[float, list[tuple[Kernel, float]], Tensor, Tensor]:
    """Choose the ridge penalty of the largest marginal likelihood for a sum of ``kernels``. Return the loss, the scaled
    kernels, and the regularized matrix's eigenvectors and eigenvalues.
    """
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


def adjusted_values(
    fit: Callable[[Tensor, Tensor], tuple[Surrogate, Tensor]],
    play: MemoizedGame,
    sample: PairedSample,
) -> tuple[Tensor, Tensor]:
    """Compute Shapley values and standard errors ``[n, M]``. The values are those of a fitted surrogate, corrected by
    its residuals.
    """
    # SV(U) = SV(g) + SV(U - g). SV(g) is exact, and with r = U - g and V = r(N) - r(empty)
    #  SV_i(r) = V/n + n sum_{s=1..n-1} 1/(s (n - s)) E_{|S|=s}[ r(S) (z_i - s/n) ],
    # KernelSHAP with the expectation of its matrix in place of the sampled one (Witter, Liu and Musco, arXiv
    # 2506.11849, 2025, found the scheme independently). The residuals are those of the fit's own coalitions, which
    # biases towards the surrogate.
    layers, n = sample.layers, sample.num_players
    total = 2 * sum(len(layer.masks) for layer in layers)
    fitted = [max(2, round(len(layer.masks) * min(1.0, _MAX_FIT / total))) for layer in layers]
    ends = torch.arange(2)[:, None].expand(2, n).bool()
    halves = torch.cat([layer.masks[:count] for layer, count in zip(layers, fitted, strict=True)])
    masks, gains = torch.cat([ends, halves, ~halves]), play(ends)
    game, left_out = fit(masks, play(masks))
    gap = gains - game(ends)
    values = game.shapley() + (gap[1] - gap[0]) / n
    pairs_left_out = (left_out[2 : 2 + len(halves)] - left_out[2 + len(halves) :]).split(fitted)
    variance = torch.zeros(())
    for layer, unseen in zip(layers, pairs_left_out, strict=True):
        # The Shapley kernel's weight of a size s, divided by n - 1, is 1 / (s (n - s)) (Lundberg and Lee, 2017).
        share = layer.sizes / (layer.size * (n - layer.size))
        factor = share * n / 2 * (layer.masks.double() - layer.size / n).unsqueeze(-1)
        residuals = play(layer.masks) - play(~layer.masks) - game(layer.masks) + game(~layer.masks)
        values = values + (factor * residuals.unsqueeze(1)).mean(dim=0)
        residuals[: len(unseen)] = unseen  # of a fit without the pair
        count = len(layer.masks)
        if count < layer.capacity:
            # The errors are 1 to 1.8 times the spread, except on very smooth games (0.6 times), without the bias:
            # docs/results/intervals_digits.csv.
            terms = factor * residuals.unsqueeze(1)
            influences = (terms - terms.mean(dim=0)) / (count * (count - 1)) ** 0.5
            variance = variance + (1 - count / layer.capacity) * influences.square().sum(dim=0)
    return values, variance.sqrt().expand_as(values)


def surrogate_shapley(
    utility: Utility,
    num_players: int,
    *,
    budget: int | None = None,
    generator: Generator | None = None,
) -> ShapleyEstimate:
    """Estimate the Shapley value by a fitted surrogate game, plus a correction.

    The surrogate is a kernel ridge regression with an exact Shapley value. The correction is the Shapley value of its
    residuals, the differences between the utilities and the surrogate, estimated from the sampled coalitions.

    Args:
        utility: the game, from masks bool ``[K, n]`` to utilities ``[K]``, or ``[K, M]`` for M games at once.
        num_players: the number n of players.
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
    sample = PairedSample(num_players, generator)
    run = Sampling("surrogate_shapley", utility, num_players, budget, 2 + 2 * sample.minimum)
    if run.buys_all or num_players <= 2:
        return exact_shapley(utility, num_players)
    sample.draw((run.budget - 2) // 2)
    return run.estimate(*adjusted_values(partial(fit_surrogate, SURROGATES), run, sample))
