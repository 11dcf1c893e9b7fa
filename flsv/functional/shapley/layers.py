"""Layers: samples of distinct coalitions of each size, for the estimators that average by size.

All coalitions of one size are a *layer*. Draws from a layer are without replacement: no coalition is evaluated twice, a
completely drawn layer contributes no error, and the drawn fraction of a layer enters the standard error. With n
players, the layers of the sizes 1 and n - 1 are always drawn completely: they are the smallest, and have the largest
weights in the Shapley kernel.

*Draws per size*, unless ``share`` is given: the number m of draws from the layer of size s is proportional to
1 / sqrt(s (n - s)). The layer enters a player's Shapley value with weight 1/n, as a mean over the coalitions that
contain the player (a fraction s/n) and a mean over the others. If utilities spread equally at all sizes, the variance
from this layer is proportional to (1/m) (n/s + n/(n - s)) = n^2 / (s (n - s) m). The rule minimizes the sum of these
variances for a fixed number of draws. Kernel regression leads to the same rule (the kernel weight 1 / (s (n - s)) times
the length sqrt(s (n - s) / n) of the centered membership vector).

*Pairs.* With ``paired`` a draw is a coalition together with its complement; the sizes s and n - s are one layer.

*Cover.* With ``cover`` the first draws from a layer are a random division of the players into blocks, so that every
player is in at least one coalition of every size, and outside at least one. Estimators that average by player and size
need this. The averages stay unbiased: the distribution of the sample is the same for every relabeling of the players,
so that, given which of the drawn coalitions contain player i, the other members of each are uniform.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Generator, Tensor

from flsv.functional.shapley.budget import Sampling
from flsv.functional.shapley.exact import exact_shapley
from flsv.functional.shapley.game import ShapleyEstimate, Utility, coalition_keys
from flsv.functional.shapley.memoized_game import MemoizedGame
from flsv.functional.shapley.random_coalitions import random_coalitions, random_permutations


@dataclass
class Layer:
    """Layer of coalitions of one size, or of pairs of such a coalition and its complement, with those drawn so far.

    Attributes:
        size: the size s of the coalitions; for pairs, that of the smaller half.
        capacity: the number of all coalitions (or pairs) of this size.
        minimum: the number of coalitions (or pairs) to draw at least.
        sizes: the number of sizes in the layer: 2 for pairs whose halves differ in size, otherwise 1.
        masks: the m drawn coalitions, bool ``[m, n]``, distinct. A pair is stored as its half of size s; if both halves
            have this size, as the half that contains player 0.
        seen: the keys of the drawn coalitions.
    """

    size: int
    capacity: int
    minimum: int
    sizes: int
    masks: Tensor
    seen: set[int | bytes] = field(default_factory=set)

    @property
    def fraction(self) -> float:
        """Return the drawn fraction of the layer: the number of drawn coalitions (or pairs) divided by ``capacity``."""
        return len(self.masks) / self.capacity


class LayeredSample:
    """Random sample of distinct coalitions of each size from 1 to n - 1, drawn without replacement.

    Args:
        num_players: the number n of players.
        paired: whether to draw each coalition together with its complement.
        cover: whether to draw at least one coalition with and one without each player at every size.
        share: function of a layer; the number of draws from a layer is proportional to its result. None: the sum of
            1 / sqrt(s (n - s)) over the layer's sizes s.
        generator: the random generator of the draws; None: torch's default.

    Attributes:
        layers: the layers of the sizes 1..n-1, or 1..n/2 if paired; empty for a single player.
        minimum: the smallest number of coalitions (or pairs) that can be drawn.
        capacity: the number of coalitions (or pairs) in all layers.
    """

    def __init__(
        self,
        num_players: int,
        *,
        paired: bool,
        cover: bool = False,
        share: Callable[[Layer], float] | None = None,
        generator: Generator | None = None,
    ) -> None:
        self.num_players, self.paired, self.cover, self.generator = num_players, paired, cover, generator
        self._share = share or self._equal_spread
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

    def grow(self, total: int) -> None:
        """Draw further coalitions (or pairs) until there are ``total`` in all layers together."""
        counts = [max(layer.minimum, len(layer.masks)) for layer in self.layers]
        share = [self._share(layer) for layer in self.layers]
        heap = [((counts[k] + 1) / share[k], k) for k in range(len(counts)) if counts[k] < self.layers[k].capacity]
        heapq.heapify(heap)
        for _ in range(min(total, self.capacity) - sum(counts)):
            _, k = heapq.heappop(heap)
            counts[k] += 1
            if counts[k] < self.layers[k].capacity:
                heapq.heappush(heap, ((counts[k] + 1) / share[k], k))
        for layer, count in zip(self.layers, counts, strict=True):
            self._draw(layer, count)

    def _equal_spread(self, layer: Layer) -> float:
        """Return the shares that are optimal if utilities have the same variance at all sizes."""
        return layer.sizes / math.sqrt(layer.size * (self.num_players - layer.size))

    def _draw(self, layer: Layer, count: int) -> None:
        """Draw coalitions (or pairs) of a layer until it has ``count``."""
        if count > len(layer.masks) and count == layer.capacity:
            self._add(layer, self._all(layer), count)
        elif self.cover and len(layer.masks) == 0:
            self._add(layer, self._blocks(layer.size), count)
        while len(layer.masks) < count:
            sizes = torch.full((count - len(layer.masks) + 4,), layer.size)
            self._add(layer, random_coalitions(sizes, self.num_players, self.generator), count)

    def _add(self, layer: Layer, masks: Tensor, count: int) -> None:
        """Add coalitions that a layer does not have yet, until it has ``count``."""
        if self.paired and 2 * layer.size == self.num_players:
            masks = masks ^ ~masks[:, :1]
        new = []
        for position, key in enumerate(coalition_keys(masks)):
            if key not in layer.seen and len(layer.seen) < count:
                layer.seen.add(key)
                new.append(position)
        layer.masks = torch.cat([layer.masks, masks[new]])

    def _blocks(self, size: int) -> Tensor:
        """Draw coalitions of one size such that every player is inside one and outside another."""
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
    """Compute the part of an estimate's variance that comes from the sampling of one layer.

    Args:
        layer: the layer, with m draws.
        influences: ``[m, n, M]``, the deviation of the estimate that each draw causes. The influences sum to 0. Their
            squares sum to an unbiased estimate of the variance with replacement, which is multiplied by 1 minus the
            drawn fraction.

    Returns:
        ``[n, M]``; 0 if the layer is drawn completely, otherwise NaN with fewer than two draws.
    """
    if len(layer.masks) == layer.capacity:
        return torch.zeros(influences.shape[1:], dtype=influences.dtype)
    if len(layer.masks) < 2:
        return torch.full(influences.shape[1:], torch.nan, dtype=influences.dtype)
    return (1 - layer.fraction) * influences.square().sum(dim=0)


def estimate_in_stages(
    name: str,
    utility: Utility,
    sample: LayeredSample,
    budget: int | None,
    target_stderr: float | None,
    estimator: Callable[[MemoizedGame, LayeredSample], tuple[Tensor, Tensor]],
    size_weights: Sequence[float] | None = None,
) -> ShapleyEstimate:
    """Draw as many coalitions as the budget suffices for, and estimate the values from them.

    With a target, the sample starts at its minimum and grows by half in each stage, until the target is reached or the
    budget is spent. The result is exact for up to 2 players, and also if there is no target and the budget suffices for
    all coalitions.

    Args:
        name: the estimator's name, for error messages.
        utility: the game: a function from K coalitions (masks, bool ``[K, n]``) to their utilities, float ``[K]``, or
            ``[K, M]`` for M games at once.
        sample: the sample, to which coalitions are added.
        budget: the largest number of distinct evaluations, see :class:`flsv.functional.shapley.budget.Sampling`. It
            must suffice for the sample's minimum and for the empty and the grand coalition.
        target_stderr: the standard error at which to stop; None: no target.
        estimator: computes values and standard errors, both ``[n, M]``, from the memoized game and the sample.
        size_weights: the n weights of the semivalue, used if the result is exact, see :func:`exact_shapley`.

    Returns:
        The estimate.
    """
    at_least = 2 + sample.minimum * (2 if sample.paired else 1)
    run = Sampling(name, utility, sample.num_players, budget, at_least, target_stderr)
    if run.exact or sample.num_players <= 2:
        return exact_shapley(utility, sample.num_players, size_weights=size_weights)
    total = min((run.budget - 2) // (2 if sample.paired else 1), sample.capacity)
    size = total if run.target_stderr is None else min(sample.minimum, total)
    while True:
        sample.grow(size)
        values, stderr = estimator(run.game, sample)
        if size >= total or run.reached(stderr):
            return run.game.estimate(values, stderr)
        size = min(total, size + size // 2 + 1)
