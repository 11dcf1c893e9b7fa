"""Estimates by coalition size: stratified sampling of any semivalue, and complementary contributions."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Generator, Tensor

from flsv.functional.shapley.exact import exact_shapley
from flsv.functional.shapley.game import MemoizedGame, Sampling, ShapleyEstimate, Utility, coalition_keys
from flsv.functional.shapley.permutation import random_coalitions, random_permutations


@dataclass
class Layer:
    """Coalitions of one size, or pairs of such a coalition and its complement."""

    # ``masks [m, n]`` are those drawn, of ``capacity``; of a pair the half of size s, or the one with player 0.
    # ``sizes`` is 2 for pairs whose halves differ in size.

    size: int
    capacity: int
    minimum: int
    sizes: int
    masks: Tensor
    seen: set[int | bytes] = field(default_factory=set)


class LayeredSample:
    """Random sample of distinct coalitions of each size, drawn without replacement."""

    # The sizes 1 and n - 1 are always drawn completely: they are the smallest, and weigh most in the Shapley kernel.
    # With ``cover`` every size has a coalition with and one without each player.

    def __init__(
        self,
        num_players: int,
        *,
        paired: bool,
        cover: bool = False,
        size_weights: Sequence[float] | None = None,
        generator: Generator | None = None,
    ) -> None:
        self.num_players, self.paired, self.cover, self.generator = num_players, paired, cover, generator
        self.size_weights = size_weights
        self.layers: list[Layer] = []
        for size in range(1, (num_players // 2 if paired else num_players - 1) + 1):
            middle = paired and 2 * size == num_players
            capacity = math.comb(num_players, size) // (2 if middle else 1)
            short = min(size, num_players - size)
            minimum = 2
            if short == 1:
                minimum = num_players
            elif cover:
                minimum = max(minimum, 1 if middle else -(-num_players // short))
            empty = torch.empty(0, num_players, dtype=torch.bool)
            layer = Layer(size, capacity, min(minimum, capacity), 2 if paired and not middle else 1, empty)
            self.layers.append(layer)
        self.minimum = sum(layer.minimum for layer in self.layers)
        self.capacity = sum(layer.capacity for layer in self.layers)

    def draw(self, total: int) -> None:
        """Draw ``total`` coalitions (or pairs)."""
        counts = [layer.minimum for layer in self.layers]
        share = [self._share(layer) for layer in self.layers]
        heap = [((counts[k] + 1) / share[k], k) for k in range(len(counts)) if counts[k] < self.layers[k].capacity]
        heapq.heapify(heap)
        for _ in range(min(total, self.capacity) - sum(counts)):
            _, k = heapq.heappop(heap)
            counts[k] += 1
            if counts[k] < self.layers[k].capacity:
                heapq.heappush(heap, ((counts[k] + 1) / share[k], k))
        for layer, count in zip(self.layers, counts, strict=True):
            if count == layer.capacity:
                self._add(layer, self._all(layer), count)
            elif self.cover:
                self._add(layer, self._blocks(layer.size), count)
            while len(layer.masks) < count:
                sizes = torch.full((count - len(layer.masks) + 4,), layer.size)
                self._add(layer, random_coalitions(sizes, self.num_players, self.generator), count)

    def _share(self, layer: Layer) -> float:
        """Return a layer's share of the draws, which is optimal if utilities spread equally at all sizes."""
        # With m draws a layer adds (q_{s-1}^2 n/s + q_s^2 n/(n-s)) / m to the variance: q_{s-1} weighs the mean over a
        # player's coalitions, a fraction s/n, and q_s that over the others. For q = 1/n this is 1 / (s (n - s) m).
        s, n = layer.size, self.num_players
        if self.size_weights is None:
            return layer.sizes / math.sqrt(s * (n - s))
        inside, outside = self.size_weights[s - 1], self.size_weights[s]
        return max(math.sqrt(inside**2 * n / s + outside**2 * n / (n - s)), 1e-12)

    def _add(self, layer: Layer, masks: Tensor, count: int) -> None:
        """Add new coalitions to a layer until it has ``count``."""
        if self.paired and 2 * layer.size == self.num_players:
            masks = masks ^ ~masks[:, :1]
        new = []
        for position, key in enumerate(coalition_keys(masks)):
            if key not in layer.seen and len(layer.seen) < count:
                layer.seen.add(key)
                new.append(position)
        layer.masks = torch.cat([layer.masks, masks[new]])

    def _blocks(self, size: int) -> Tensor:
        """Divide the players at random into coalitions of one size, so that each is inside one and outside another."""
        # Means by player stay unbiased: given which coalitions contain a player, their other members are uniform.
        short = min(size, self.num_players - size)
        order = random_permutations(1, self.num_players, self.generator)[0]
        count = -(-self.num_players // short)
        positions = (torch.arange(count)[:, None] * short + torch.arange(short)) % self.num_players
        blocks = torch.zeros(count, self.num_players, dtype=torch.bool).scatter_(1, order[positions], True)
        return blocks if short == size else ~blocks

    def _all(self, layer: Layer) -> Tensor:
        """List all coalitions of a layer's size in random order, bool ``[capacity, n]``."""
        members = torch.tensor(list(itertools.combinations(range(self.num_players), layer.size)))
        members = members[torch.randperm(len(members), generator=self.generator)]
        return torch.zeros(len(members), self.num_players, dtype=torch.bool).scatter_(1, members, True)


def layer_variance(layer: Layer, influences: Tensor) -> Tensor:
    """Compute the variance ``[n, M]`` from sampling one layer, from the m draws' influences ``[m, n, M]``."""
    # Influences sum to 0, their squares to an unbiased estimate of the variance with replacement.
    if len(layer.masks) == layer.capacity:
        return torch.zeros(influences.shape[1:], dtype=influences.dtype)
    if len(layer.masks) < 2:
        return torch.full(influences.shape[1:], torch.nan, dtype=influences.dtype)
    return (1 - len(layer.masks) / layer.capacity) * influences.square().sum(dim=0)


def estimate_by_size(
    name: str,
    utility: Utility,
    sample: LayeredSample,
    budget: int | None,
    estimator: Callable[[MemoizedGame, LayeredSample], tuple[Tensor, Tensor]],
) -> ShapleyEstimate:
    """Draw as many coalitions as the budget suffices for, and estimate the values from them."""
    each = 2 if sample.paired else 1
    run = Sampling(name, utility, sample.num_players, budget, 2 + sample.minimum * each)
    if run.buys_all or sample.num_players <= 2:
        return exact_shapley(utility, sample.num_players, size_weights=sample.size_weights)
    sample.draw((run.budget - 2) // each)
    return run.estimate(*estimator(run, sample))


def stratum_means(members: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Compute players' means ``[n, M]`` over the draws that contain them, and draws' influences ``[m, n, M]``."""
    # The squared influences sum to the unbiased variance of the mean. ``values`` are ``[m, M]``, or ``[m, n, M]`` if
    # they depend on the player.
    weights = members.to(torch.float64).unsqueeze(-1)
    values = values.unsqueeze(1).expand(-1, members.shape[1], -1) if values.ndim == 2 else values
    count = weights.sum(dim=0)
    mean = (weights * values).sum(dim=0) / count
    # A single draw has no spread: its distance from the mean of all players' draws overestimates the variance.
    center = torch.where(count > 1, mean, (weights * values).sum(dim=(0, 1)) / weights.sum())
    correction = (count / (count - 1).clamp_min(1)).sqrt() / count
    return mean, weights * (values - center) * correction


def _efficient(values: Tensor, gain: Tensor) -> Tensor:
    """Shift the values ``[n, M]`` of all players equally, so that they sum to the grand coalition's gain ``[M]``."""
    return values + (gain - values.sum(dim=-2, keepdim=True)) / values.shape[-2]


def stratified_shapley(
    utility: Utility,
    num_players: int,
    *,
    budget: int | None = None,
    generator: Generator | None = None,
    size_weights: Sequence[float] | None = None,
) -> ShapleyEstimate:
    """Estimate a semivalue by mean utilities with and without each player.

    With q the weights of coalition sizes (1/n for the Shapley value), the value of player i in the game U is

        phi_i = sum_{s=1..n} q_{s-1} E[U(S) | i in S, |S| = s] - sum_{s=0..n-1} q_s E[U(S) | i not in S, |S| = s].

    A coalition is a sample for all players, and none is evaluated twice. The numbers of draws per size minimize the
    variance if utilities spread equally at all sizes. Shapley values are shifted equally to sum to the grand
    coalition's gain, which can only reduce their squared error.

    Args:
        utility: the game, from masks bool ``[K, n]`` to utilities ``[K]``, or ``[K, M]`` for M games at once.
        num_players: the number n of players.
        budget: largest number of distinct evaluations. None: 50 n. The minimum covers,
            for each player and size, a coalition with the player and one without: 48 evaluations for 10 players, in
            general about 2 n (1 + log n).
        generator: the random generator that draws the coalitions. None: torch's default.
        size_weights: the n weights q of another semivalue, see :mod:`flsv.functional.shapley.semivalues`.

    Returns:
        The estimate: ``values`` (unbiased) and ``stderr``, ``[n]`` or ``[n, M]``. The values are exact, with stderr 0,
        if the budget suffices for all coalitions.

    Raises:
        ConfigurationError: the budget is below the minimum, which the message names, or there is no player.
        ValueError: a utility is NaN or infinite, or ``utility`` returns a wrong shape.

    Example:
        >>> square = lambda masks: masks.sum(dim=1).double() ** 2
        >>> stratified_shapley(square, 12, budget=100, generator=torch.Generator().manual_seed(0)).values[:3]
        tensor([12., 12., 12.], dtype=torch.float64)
    """
    sample = LayeredSample(num_players, paired=False, cover=True, size_weights=size_weights, generator=generator)
    by_size = partial(_by_size, size_weights=size_weights)
    return estimate_by_size("stratified_shapley", utility, sample, budget, by_size)


def _by_size(game: MemoizedGame, sample: LayeredSample, size_weights: Sequence[float] | None) -> tuple[Tensor, Tensor]:
    """Compute values and standard errors ``[n, M]`` from a sample of single coalitions."""
    n, (empty, grand) = game.num_players, game.empty_and_grand()
    weights = [1 / n] * n if size_weights is None else size_weights
    values = (weights[-1] * (grand - empty)).repeat(n, 1)
    variance = torch.zeros_like(values)
    for layer in sample.layers:
        utilities = game(layer.masks) - empty  # so that the values of a constant game are exactly 0
        inside, influence_inside = stratum_means(layer.masks, utilities)
        outside, influence_outside = stratum_means(~layer.masks, utilities)
        joined, left = weights[layer.size - 1], weights[layer.size]
        values = values + joined * inside - left * outside
        influences = joined * influence_inside - left * influence_outside
        if size_weights is None:  # the shift below takes the mean over the players away
            influences = influences - influences.mean(dim=1, keepdim=True)
        variance = variance + layer_variance(layer, influences)
    return _efficient(values, grand - empty) if size_weights is None else values, variance.sqrt()


def complementary_shapley(
    utility: Utility,
    num_players: int,
    *,
    budget: int | None = None,
    generator: Generator | None = None,
) -> ShapleyEstimate:
    r"""Estimate the Shapley value by mean complementary contributions.

    The complementary contribution of a coalition S of the n players N is CC(S) = U(S) - U(N \ S), and

        SV_i = 1/n sum_{s=1..n} E[CC(S) | i in S, |S| = s].

    A pair of evaluations is a sample for every player: CC(S) at size s for members, -CC(S) at size n - s for others.
    It is the estimator of ShapleyFL's code (Zhang et al., SIGMOD 2023). Their algorithm 3 is
    :func:`difference_shapley`. Zhang et al. draw with replacement and allocate draws by a pilot sample. Here pairs
    are distinct, and the allocation is that of :func:`stratified_shapley`.

    Args:
        utility: the game, from masks bool ``[K, n]`` to utilities ``[K]``, or ``[K, M]`` for M games at once.
        num_players: the number n of players.
        budget: largest number of distinct evaluations. None: 50 n. The minimum covers,
            for each player and size, a coalition with the player and its complement: 50 evaluations for 10 players, in
            general about 2 n (1 + log n).
        generator: the random generator that draws the coalitions. None: torch's default.

    Returns:
        The estimate, as by :func:`stratified_shapley`.

    Raises:
        ConfigurationError: the budget is below the minimum, which the message names, or there is no player.
        ValueError: a utility is NaN or infinite, or ``utility`` returns a wrong shape.

    Example:
        >>> square = lambda masks: masks.sum(dim=1).double() ** 2
        >>> complementary_shapley(square, 12, budget=100, generator=torch.Generator().manual_seed(0)).values[:3]
        tensor([12., 12., 12.], dtype=torch.float64)
    """
    sample = LayeredSample(num_players, paired=True, cover=True, generator=generator)
    return estimate_by_size("complementary_shapley", utility, sample, budget, _by_side)


def _by_side(game: MemoizedGame, sample: LayeredSample) -> tuple[Tensor, Tensor]:
    """Compute Shapley values and standard errors ``[n, M]`` from a sample of pairs."""
    n, (empty, grand) = game.num_players, game.empty_and_grand()
    values = (grand - empty).repeat(n, 1)
    variance = torch.zeros_like(values)
    for layer in sample.layers:
        contributions = game(layer.masks) - game(~layer.masks)
        if layer.sizes == 1:  # both sides have n/2 players: one stratum has all pairs, signed by the player's side
            sides = torch.where(layer.masks, 1.0, -1.0).to(torch.float64).unsqueeze(-1)
            mean, influences = stratum_means(torch.ones_like(layer.masks), sides * contributions.unsqueeze(1))
            values = values + mean
        else:
            inside, influence_inside = stratum_means(layer.masks, contributions)
            outside, influence_outside = stratum_means(~layer.masks, contributions)
            values = values + inside - outside
            influences = influence_inside - influence_outside
        variance = variance + layer_variance(layer, influences - influences.mean(dim=1, keepdim=True))
    return _efficient(values / n, grand - empty), variance.sqrt() / n
