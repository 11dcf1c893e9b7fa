"""Shapley values by a surrogate game fitted to sampled coalitions, and a correction by its residuals."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

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
from flsv.functional.shapley.kernels import (
    Kernel,
    averaged_membership,
    gaussian,
    gram,
    kernel_shapley,
    membership,
    pairs,
)
from flsv.functional.shapley.permutation import random_coalitions


@dataclass
class Stratum:
    """Sampled pairs of a coalition of the given ``size`` and its complement."""

    # ``masks [m, n]`` are the drawn coalitions of this size, one of each pair, of ``capacity`` pairs. If both
    # coalitions of a pair have this size, the one with player 0 is stored, and ``num_sizes`` is 1, otherwise 2.

    size: int
    capacity: int
    min_num_pairs: int
    num_sizes: int
    masks: Tensor
    keys: set[int | bytes] = field(default_factory=set)


class PairedSample:
    """Random sample of distinct pairs of complementary coalitions, drawn by size without replacement."""

    # All pairs of sizes 1 and n - 1 are drawn, since they have the largest weights in the Shapley kernel.

    def __init__(
        self,
        num_players: int,
        generator: Generator | None = None,
    ) -> None:
        self.num_players = num_players
        self.generator = generator
        sizes = range(1, num_players // 2 + 1)
        self.strata = [self._empty_stratum(size) for size in sizes]
        self.min_num_pairs = sum(stratum.min_num_pairs for stratum in self.strata)
        self.capacity = sum(stratum.capacity for stratum in self.strata)

    def _empty_stratum(self, size: int) -> Stratum:
        # A stratum has the pairs of a coalition of this size and its complement.
        num_coalitions = math.comb(self.num_players, size)
        halves_have_one_size = 2 * size == self.num_players
        if halves_have_one_size:
            num_sizes = 1
            num_pairs = num_coalitions // 2
        else:
            num_sizes = 2
            num_pairs = num_coalitions
        if size == 1:
            min_num_pairs = num_pairs  # all
        else:
            min_num_pairs = min(_MIN_PAIRS, num_pairs)
        return Stratum(
            size=size,
            capacity=num_pairs,
            min_num_pairs=min_num_pairs,
            num_sizes=num_sizes,
            masks=torch.empty(0, self.num_players, dtype=torch.bool),
        )

    def draw(self, total: int) -> None:
        """Draw ``total`` pairs. The numbers of pairs are optimal if utilities have the same variance at all sizes."""
        counts = self._optimal_counts(total)
        for stratum, count in zip(self.strata, counts, strict=True):
            if count == stratum.capacity:
                masks = self._shuffled_coalitions(stratum.size)
                self._add_coalitions(stratum, masks, max_pairs=count)
                continue
            while len(stratum.masks) < count:
                # Coalitions that the stratum already has are dropped, so some more are drawn.
                num_missing = count - len(stratum.masks)
                num_draws = num_missing + _SPARE_DRAWS
                sizes = torch.full((num_draws,), stratum.size)
                masks = random_coalitions(sizes, self.num_players, self.generator)
                self._add_coalitions(stratum, masks, max_pairs=count)

    def coalitions(self) -> Tensor:
        """Return the drawn coalitions, bool ``[K, n]``. The empty and the grand one are the first."""
        halves = torch.cat([stratum.masks for stratum in self.strata])
        return _with_complements(halves)

    def _optimal_counts(self, total: int) -> list[int]:
        """Return how many of ``total`` pairs to draw from each stratum."""
        # With m draws a stratum of size s adds 1 / (s (n - s) m) to the variance. The sum over strata is smallest if m
        # is proportional to the root of 1 / (s (n - s)). So the next pair goes to the stratum with the fewest pairs
        # relative to this weight.
        counts = [stratum.min_num_pairs for stratum in self.strata]
        heap = []
        for index, count in enumerate(counts):
            heap.append((self._relative_count(index, count + 1), index))
        heapq.heapify(heap)

        num_free = min(total, self.capacity) - sum(counts)
        for _ in range(num_free):
            _, index = heap[0]
            counts[index] += 1
            next_count = counts[index] + 1
            heapq.heapreplace(heap, (self._relative_count(index, next_count), index))
        return counts

    def _relative_count(self, index: int, count: int) -> float:
        """Return a number of pairs in units of the stratum's weight. Infinity if the stratum has fewer pairs."""
        stratum = self.strata[index]
        if count > stratum.capacity:
            return math.inf
        product = stratum.size * (self.num_players - stratum.size)
        weight = stratum.num_sizes / math.sqrt(product)
        return count / weight

    def _shuffled_coalitions(self, size: int) -> Tensor:
        """Return all coalitions of a size in a random order, bool ``[K, n]``."""
        players = range(self.num_players)
        combinations = itertools.combinations(players, size)
        members = torch.tensor(list(combinations))
        count = len(members)
        order = torch.randperm(count, generator=self.generator)
        shuffled = members[order]
        masks = torch.zeros(count, self.num_players).bool()
        return masks.scatter_(1, shuffled, value=True)

    def _add_coalitions(
        self,
        stratum: Stratum,
        masks: Tensor,
        max_pairs: int,
    ) -> None:
        """Add new coalitions to a stratum until it has ``max_pairs``."""
        if 2 * stratum.size == self.num_players:
            # Both coalitions of a pair have this size. The one with player 0 represents the pair.
            has_first_player = masks[:, :1]
            masks = torch.where(has_first_player, masks, ~masks)
        new_positions = []
        for position, key in enumerate(coalition_keys(masks)):
            if key not in stratum.keys and len(stratum.keys) < max_pairs:
                stratum.keys.add(key)
                new_positions.append(position)
        stratum.masks = torch.cat([stratum.masks, masks[new_positions]])


def _with_complements(halves: Tensor) -> Tensor:
    """Return the empty and the grand coalition, ``halves [K, n]``, and their complements."""
    empty = torch.zeros_like(halves[:1])
    return torch.cat([empty, ~empty, halves, ~halves])


_MAX_FITTED_COALITIONS = 1000
_MIN_PAIRS = 2  # per size, the minimum for a variance
_SPARE_DRAWS = 4  # in case some draws are duplicates
#: The smallest variance, which avoids a division by 0.
TINY = 1e-12

#: The candidates of :class:`JointSurrogate`, each a list of kernels to sum.
SURROGATES: list[list[Kernel]] = [
    [membership, gaussian(0.1)],
    [membership, gaussian(0.3)],
    [membership, gaussian(1.0)],
    [membership, gaussian(3.0)],
    [membership, pairs, averaged_membership],
    [membership],
]

PENALTIES = 10.0 ** torch.arange(-8, 2.5, 0.5, dtype=torch.float64)
#: Prior variance of the mean utility, in units of the sample's variance: a vague prior.
CONSTANT_VARIANCE = 100.0


@dataclass(frozen=True, eq=False)
class ScaledKernel:
    """Sum of kernels with unit variance over K coalitions, and the decomposition of its matrix between them."""

    parts: list[tuple[Kernel, float]]
    coalitions: Tensor
    #: Float64 ``[K]`` and ``[K, K]``. The matrix includes :data:`CONSTANT_VARIANCE`.
    eigenvalues: Tensor
    eigenvectors: Tensor

    def matrix(self, masks: Tensor) -> Tensor:
        """Compute the kernel ``[A, K]`` between masks ``[A, n]`` and the K coalitions."""
        matrix = torch.zeros(())
        for part, scale in self.parts:
            matrix = matrix + scale * gram(part, masks, self.coalitions)
        return matrix

    def shapley(self) -> Tensor:
        """Compute the Shapley values ``[K, n]`` of the games S -> k(S, T), for each of the K coalitions T."""
        values = torch.zeros(())
        for part, scale in self.parts:
            values = values + scale * kernel_shapley(part, self.coalitions)
        return values


def scale_kernels(kernels: list[Kernel], coalitions: Tensor) -> ScaledKernel:
    """Scale each of ``kernels`` to unit variance over the ``coalitions [K, n]``, and decompose their sum."""
    num_coalitions = len(coalitions)
    parts: list[tuple[Kernel, float]] = []
    matrix = torch.full((num_coalitions, num_coalitions), CONSTANT_VARIANCE).double()
    for kernel in kernels:
        part = gram(kernel, coalitions, coalitions)
        variance = part.diagonal().mean() - part.mean()
        variance = variance.clamp_min(TINY)
        parts.append((kernel, 1 / float(variance)))
        matrix = matrix + part / variance
    eigenvalues, eigenvectors = torch.linalg.eigh(matrix)
    return ScaledKernel(parts, coalitions, eigenvalues, eigenvectors)


@dataclass(frozen=True, eq=False)
class Surrogate:
    """Game g(S) = offset + sum_T a_T k(S, T), fitted to the utilities of coalitions T."""

    kernel: ScaledKernel
    coefficients: Tensor
    offset: Tensor

    def utilities(self, matrix: Tensor) -> Tensor:
        """Compute the fitted utilities ``[A, M]`` of A coalitions from the kernel's ``matrix [A, K]``."""
        return self.offset + matrix @ self.coefficients

    def shapley(self) -> Tensor:
        """Compute the fitted game's exact Shapley values ``[n, M]``."""
        return self.kernel.shapley().T @ self.coefficients


def fit_surrogate(
    kernels: list[ScaledKernel],
    utilities: Tensor,
) -> tuple[Surrogate, Tensor]:
    """Fit a surrogate by kernel ridge regression, and return it with the leave-one-out residuals ``[K, M]``.

    One of the ``kernels`` and the ridge penalty maximize the marginal likelihood of the utilities ``[K, M]``.
    """
    mean = utilities.mean(dim=0)
    deviation = utilities.std(dim=0)
    # A constant column has only a mean, so its standardized utilities and its scale are 0.
    is_constant = ~(deviation > TINY * (1 + mean.abs()))
    divisors = deviation.masked_fill(is_constant, torch.inf)
    standardized = (utilities - mean) / divisors
    scale = divisors.masked_fill(divisors.isinf(), 0)

    fits = [_fit_ridge(kernel, standardized) for kernel in kernels]
    best_fit = min(fits, key=lambda fit: fit.loss)
    dual = best_fit.dual_coefficients(standardized)
    offset = mean + CONSTANT_VARIANCE * dual.sum(dim=0) * scale
    surrogate = Surrogate(best_fit.kernel, dual * scale, offset)
    residuals = best_fit.leave_one_out_residuals(dual) * scale
    return surrogate, residuals


@dataclass(frozen=True, eq=False)
class _RidgeFit:
    """A kernel, and the eigenvalues ``[K]`` of its matrix plus the ridge penalty."""

    loss: float
    kernel: ScaledKernel
    eigenvalues: Tensor

    def dual_coefficients(self, y: Tensor) -> Tensor:
        """Compute the coefficients ``[K, M]`` of the kernel's functions."""
        vectors = self.kernel.eigenvectors  # [K, K]
        coordinates = (vectors.T @ y) / self.eigenvalues.unsqueeze(1)
        return vectors @ coordinates

    def leave_one_out_residuals(self, dual: Tensor) -> Tensor:
        """Compute residuals ``[K, M]``: dual coefficients, divided by the diagonal of the inverse matrix."""
        squares = self.kernel.eigenvectors.square() / self.eigenvalues
        return dual / squares.sum(dim=1, keepdim=True)


def _fit_ridge(kernel: ScaledKernel, y: Tensor) -> _RidgeFit:
    """Choose the ridge penalty of the largest marginal likelihood."""
    # The loss of each penalty is minus its marginal likelihood: spectra [penalties, K], power [penalties, M].
    spectra = kernel.eigenvalues.clamp_min(0) + PENALTIES[:, None]
    squares = (kernel.eigenvectors.T @ y).square()
    power = (squares / spectra[..., None]).mean(dim=1)
    power = power.clamp_min(TINY)
    log_power = power.log().mean(dim=1)
    log_spectrum = spectra.log().mean(dim=1)
    losses = log_power + log_spectrum
    best_penalty = int(losses.argmin())
    return _RidgeFit(float(losses[best_penalty]), kernel, spectra[best_penalty])


class JointSurrogate:
    """Surrogates of several games on the same coalitions, which share the kernels' decompositions and matrices.

    Args:
        masks: bool ``[K, n]``, the coalitions of the fit.
        utilities: ``[K, M]``.
        num_parts: the number of equal parts of the M columns to which kernel and penalty are fitted separately.
    """

    def __init__(self, masks: Tensor, utilities: Tensor, num_parts: int = 1) -> None:
        kernels = [scale_kernels(candidate, masks) for candidate in SURROGATES]
        self._surrogates = []
        residuals = []
        for part in utilities.chunk(num_parts, dim=1):
            surrogate, part_residuals = fit_surrogate(kernels, part)
            self._surrogates.append(surrogate)
            residuals.append(part_residuals)
        #: The leave-one-out residuals, [K, M].
        self.residuals = torch.cat(residuals, dim=1)

    def __call__(self, masks: Tensor) -> Tensor:
        """Compute the fitted utilities ``[A, M]`` of masks ``[A, n]``."""
        matrices: dict[ScaledKernel, Tensor] = {}
        utilities = []
        for surrogate in self._surrogates:
            kernel = surrogate.kernel
            if kernel not in matrices:
                matrices[kernel] = kernel.matrix(masks)
            utilities.append(surrogate.utilities(matrices[kernel]))
        return torch.cat(utilities, dim=1)

    def shapley(self) -> Tensor:
        """Compute the fitted games' exact Shapley values ``[n, M]``."""
        values = [surrogate.shapley() for surrogate in self._surrogates]
        return torch.cat(values, dim=1)


def adjusted_values(
    utility: MemoizedGame,
    sample: PairedSample,
    num_parts: int = 1,
) -> tuple[Tensor, Tensor]:
    """Compute Shapley values and standard errors ``[n, M]``. The values are those of a fitted surrogate, corrected by
    its residuals. ``num_parts`` is that of :class:`JointSurrogate`.
    """
    # SV(U) = SV(g) + SV(U - g). SV(g) is exact, and with r = U - g and V = r(N) - r(empty)
    #  SV_i(r) = V/n + n sum_{s=1..n-1} 1/(s (n - s)) E_{|S|=s}[ r(S) (z_i - s/n) ],
    # KernelSHAP with the expectation of its matrix in place of the sampled one (as in Witter, Liu and Musco, arXiv
    # 2506.11849, 2025). The residuals are those of the coalitions used in the fit, which biases towards the surrogate.
    fitted_halves = _masks_to_fit(sample.strata)
    fitted_masks = _with_complements(torch.cat(fitted_halves))
    surrogate = JointSurrogate(fitted_masks, utility(fitted_masks), num_parts)
    empty_and_grand = fitted_masks[:2]
    empty_residual, grand_residual = utility(empty_and_grand) - surrogate(empty_and_grand)
    values = surrogate.shapley() + (grand_residual - empty_residual) / sample.num_players

    variance = torch.zeros(())
    left_out_by_stratum = _residuals_of_pairs(surrogate, fitted_halves)
    for stratum, left_out_residuals in zip(sample.strata, left_out_by_stratum, strict=True):
        halves = stratum.masks
        utility_differences = utility(halves) - utility(~halves)  # [m, M]
        residuals = utility_differences - surrogate(halves) + surrogate(~halves)
        values = values + _terms_of_pairs(stratum, residuals).mean(dim=0)

        # The errors of the first pairs, to which the surrogate was fitted, are their leave-one-out residuals.
        not_fitted_residuals = residuals[len(left_out_residuals) :]
        errors = torch.cat([left_out_residuals, not_fitted_residuals])
        variance = variance + _variance_of_stratum(stratum, errors)
    return values, variance.sqrt().expand_as(values)


def _residuals_of_pairs(
    surrogate: JointSurrogate,
    halves: list[Tensor],
) -> Sequence[Tensor]:
    """Return the leave-one-out residuals of each stratum's fitted pairs: a half's minus its complement's."""
    residuals = surrogate.residuals[2:]  # without the empty and the grand coalition
    of_halves, of_complements = residuals.chunk(2)
    sizes = [len(half) for half in halves]
    return (of_halves - of_complements).split(sizes)


def _terms_of_pairs(stratum: Stratum, residuals: Tensor) -> Tensor:
    """Return the terms ``[m, n, M]`` by which pairs' residuals ``[m, M]`` contribute to the values."""
    # The Shapley kernel's weight of a size s, divided by n - 1, is 1 / (s (n - s)) (Lundberg and Lee, 2017).
    n = stratum.masks.shape[1]
    share = stratum.num_sizes / (stratum.size * (n - stratum.size))
    deviations = stratum.masks.double() - stratum.size / n
    scale = share * n / 2
    factors = scale * deviations.unsqueeze(-1)  # [m, n, 1]
    return factors * residuals.unsqueeze(1)


def _variance_of_stratum(stratum: Stratum, residuals: Tensor) -> Tensor:
    """Return the variance ``[n, M]`` of a stratum's mean terms, 0 if all of its pairs were drawn."""
    count = len(stratum.masks)
    if count == stratum.capacity:
        return torch.zeros(())
    # The errors are 1 to 1.8 times the spread, except on very smooth games (0.6 times), without the bias:
    # docs/results/intervals_digits.csv.
    terms = _terms_of_pairs(stratum, residuals)
    normalization = (count * (count - 1)) ** 0.5
    influences = (terms - terms.mean(dim=0)) / normalization
    share_missing = 1 - count / stratum.capacity
    return share_missing * influences.square().sum(dim=0)


def _masks_to_fit(strata: list[Stratum]) -> list[Tensor]:
    """Return the sampled coalitions of each stratum, bool ``[m, n]``, to which the surrogate is fitted: all, or the
    first ones if there are too many.
    """
    # A fit's time grows with the cube of the number of coalitions. Complements are fitted, too.
    num_coalitions = 2 * sum(len(stratum.masks) for stratum in strata)
    fitted_share = min(1.0, _MAX_FITTED_COALITIONS / num_coalitions)
    masks_to_fit = []
    for stratum in strata:
        num_fitted = round(fitted_share * len(stratum.masks))
        num_fitted = max(num_fitted, _MIN_PAIRS)
        masks_to_fit.append(stratum.masks[:num_fitted])
    return masks_to_fit


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
        ConfigurationError: the budget is below the minimum, or there is no player.
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
    return joint_shapley(utility, num_players, budget=budget, generator=generator)


def joint_shapley(
    utility: Utility,
    num_players: int,
    *,
    budget: int | None = None,
    generator: Generator | None = None,
    num_parts: int = 1,
) -> ShapleyEstimate:
    """Estimate Shapley values as :func:`surrogate_shapley`, of several games on the same drawn coalitions.

    ``num_parts`` is the number of games, which each have as many columns. A surrogate is fitted to each of them.
    """
    sample = PairedSample(num_players, generator)
    # Besides the sampled pairs, the empty and the grand coalition are evaluated.
    minimum = 2 + 2 * sample.min_num_pairs
    game = Sampling("surrogate_shapley", utility, num_players, budget, minimum)
    if game.can_evaluate_all or num_players <= 2:
        return exact_shapley(utility, num_players)
    num_pairs = (game.budget - 2) // 2
    sample.draw(num_pairs)
    game(sample.coalitions())  # evaluated in one call
    values, stderr = adjusted_values(game, sample, num_parts)
    return game.estimate(values, stderr)
