"""Layers: distinct coalitions of each size, for the estimators that average by size.

The coalitions of one size are a *layer*. A layer is drawn without replacement, so no evaluation is spent twice, a layer
that is drawn completely contributes no error at all, and the sampling fraction enters the standard error. Sizes 1 and
n - 1 are always complete: they are the cheapest layers and the ones that weigh most in the Shapley kernel.

*How many of each size*, unless ``share`` is given. For a single player, the layer of size s enters the Shapley value
with weight 1/n through a mean over the s/n of its coalitions that contain the player and a mean over the others. If
utilities spread equally at all sizes, its error has variance proportional to (1/m)(n/s + n/(n - s)) = n^2 / (s (n - s)
m) for m samples, and minimizing the sum at fixed cost gives m proportional to 1 / sqrt(s (n - s)). Kernel regression
leads to the same rule (kernel weight 1 / (s (n - s)) times the length sqrt(s (n - s) / n) of the centered membership
vector).

*Pairs.* With ``paired`` the unit is a coalition together with its complement; layers s and n - s are one.

*Cover.* With ``cover`` a layer starts with a random division of the players into blocks, so that every player is in,
and out of, at least one coalition of every size, which estimators that average by player and size need.

Which coalitions are drawn depends on players only through their random order: the law of the sample is the same for
every relabeling of the players. Given which of the drawn coalitions contain player i, the rest of each is therefore
uniform, and averages by player and size are unbiased, with ``cover``, too.
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
    """The coalitions of one size and those of them drawn so far.

    Attributes:
        size: s; with pairs the smaller of the two sizes.
        capacity: how many coalitions (pairs) there are.
        minimum: how many of them are always drawn.
        sizes: how many sizes the layer stands for: 2 for pairs of different size, otherwise 1.
        masks: bool ``[m, n]``, distinct, each of size s. A pair of equal sizes is stored as the half that contains
            player 0.
    """

    size: int
    capacity: int
    minimum: int
    sizes: int
    masks: Tensor
    seen: set[int | bytes] = field(default_factory=set)

    @property
    def fraction(self) -> float:
        """Return the part of all coalitions (pairs) that is drawn."""
        return len(self.masks) / self.capacity


class LayeredSample:
    """A sample of distinct coalitions, layer by layer; see the module's docstring.

    Args:
        num_players: the number n of players.
        paired: draw coalitions with their complements.
        cover: every player is in and out of a coalition of each size.
        share: a function from a layer to a number proportional to its draws; None: the module's rule.
        generator: source of the draws.

    Attributes:
        layers: one per size 1..n-1, or 1..n/2 if paired; none for a single player.
        minimum: the smallest number of coalitions (pairs) that can be drawn.
        capacity: how many coalitions (pairs) there are.
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
        """Draw until there are ``total`` coalitions (pairs) in all; earlier draws stay."""
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
        """Compute a layer's share of the draws if utilities spread equally at all sizes."""
        return layer.sizes / math.sqrt(layer.size * (self.num_players - layer.size))

    def _draw(self, layer: Layer, count: int) -> None:
        """Draw from a layer until it has ``count`` coalitions."""
        if count > len(layer.masks) and count == layer.capacity:
            self._add(layer, self._all(layer), count)
        elif self.cover and len(layer.masks) == 0:
            self._add(layer, self._blocks(layer.size), count)
        while len(layer.masks) < count:
            sizes = torch.full((count - len(layer.masks) + 4,), layer.size)
            self._add(layer, random_coalitions(sizes, self.num_players, self.generator), count)

    def _add(self, layer: Layer, masks: Tensor, count: int) -> None:
        """Add those of the masks that are new to a layer, up to ``count`` in all."""
        if self.paired and 2 * layer.size == self.num_players:
            masks = masks ^ ~masks[:, :1]
        new = []
        for position, key in enumerate(coalition_keys(masks)):
            if key not in layer.seen and len(layer.seen) < count:
                layer.seen.add(key)
                new.append(position)
        layer.masks = torch.cat([layer.masks, masks[new]])

    def _blocks(self, size: int) -> Tensor:
        """Divide the players at random into blocks of ``size``, or their complements: bool ``[B, n]``."""
        short = min(size, self.num_players - size)
        order = random_permutations(1, self.num_players, self.generator)[0]
        count = -(-self.num_players // short)
        positions = (torch.arange(count)[:, None] * short + torch.arange(short)) % self.num_players
        blocks = torch.zeros(count, self.num_players, dtype=torch.bool).scatter_(1, order[positions], True)
        return blocks if short == size else ~blocks

    def _all(self, layer: Layer) -> Tensor:
        """List all coalitions of a layer in random order."""
        members = torch.tensor(list(itertools.combinations(range(self.num_players), layer.size)))
        members = members[torch.randperm(len(members), generator=self.generator)]
        return torch.zeros(len(members), self.num_players, dtype=torch.bool).scatter_(1, members, True)


def layer_variance(layer: Layer, influences: Tensor) -> Tensor:
    """Compute the variance ``[n, M]`` of a layer's contribution to the estimate.

    Args:
        layer: the layer; its sampling fraction reduces the variance, to 0 if it is complete.
        influences: ``[m, n, M]``, how far each draw moves the estimate away from its value without sampling error; they
            sum to 0 and their squares sum to an unbiased estimate for a vanishing fraction.
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
    """Draw as many coalitions as the budget buys, and estimate.

    With a target, half as many again are drawn until the target is met. The result is exact for up to 2 players, and if
    the budget buys all coalitions and there is no target.

    Args:
        name: the estimator, for messages.
        utility: the game: a function from K coalitions (masks, bool ``[K, n]``) to their utilities, float ``[K]``, or
            ``[K, M]`` for M games at once.
        sample: the sample that grows; its minimum and the two coalitions at the ends are the budget's minimum.
        budget: the caller's, see :class:`flsv.functional.shapley.budget.Sampling`.
        target_stderr: the caller's target, or None.
        estimator: a function from the game and the sample as they stand to values and standard errors ``[n, M]``.
        size_weights: for the exact value, see :func:`exact_shapley`.
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
