"""Draws distinct coalitions of each size without replacement, for the estimators that average by size.

The coalitions of one size are a *layer*. A layer is drawn without replacement, so no evaluation is spent twice, a layer
that is drawn completely contributes no error at all, and the sampling fraction enters the standard error. Sizes 1 and
n - 1 are always complete: they are the cheapest layers and the ones that weigh most in the Shapley kernel.

*How many of each size*, unless the caller says ``share``. Seen from one player, the layer of size s enters the Shapley
value with weight 1/n through a mean over the s/n of its coalitions that contain the player and a mean over the others.
If utilities spread equally at all sizes, its error has variance proportional to (1/m)(n/s + n/(n - s)) =
n^2 / (s (n - s) m) for m samples, and minimizing the sum at fixed cost gives m proportional to 1 / sqrt(s (n - s)). The
same rule comes out of the kernel regression (kernel weight 1 / (s (n - s)) times the length sqrt(s (n - s) / n) of the
centered membership vector).

*Pairs.* With ``paired`` the unit is a coalition together with its complement; layers s and n - s are one.

*Cover.* With ``cover`` a layer starts with a random division of the players into blocks, so that every player is in,
and out of, at least one coalition of every size, which estimators that average by player and size need.

Which coalitions are drawn depends on players only through their random order: the law of the sample is the same for
every relabeling of the players. Given which of the drawn coalitions contain player i, the rest of each is therefore
uniform, and averages by player and size are unbiased, cover included.

Random orders and random coalitions, drawn in batches from one generator.

Drawn as ranks of float64 uniforms: ties, which would favor the players with low numbers, have probability below 1e-12
for a thousand players.

Budget and stopping rule that all sampled estimators share.

**Budget.** ``budget`` is the largest number of *distinct* coalitions that one call may ask for. Without one, an
estimator spends 50 n evaluations (never more than all 2^n). A budget that buys all 2^n coalitions of at most 22 players
buys the exact value, and that is what is returned.

**Why stopping on a budget leaves an estimate unbiased.** Estimators stop by looking at masks only, never at utilities,
and by rules that do not care which player has which number. The expected weight of a sample is then the same for every
relabeling of the players, as it is without stopping. Stopping on ``target_stderr`` looks at utilities; its small bias
is the usual one of sequential sampling.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Generator, Tensor

from flsv.functional.shapley.game import (
    MAX_EXACT_PLAYERS,
    MemoizedGame,
    ShapleyEstimate,
    Utility,
    coalition_keys,
    exact_shapley,
)
from flsv.utilities import progress as counting
from flsv.utilities.arguments import check_number
from flsv.utilities.errors import ConfigurationError


@dataclass
class Layer:
    """The coalitions of one size and those of them drawn so far.

    Attributes:
        size: s; with pairs the smaller of the two sizes.
        capacity: how many coalitions (pairs) there are.
        minimum: how many are always drawn.
        sizes: how many sizes the layer stands for: 2 for pairs of different size, otherwise 1.
        masks: bool ``[m, n]``, distinct, each of size s. Of a pair of equal size, the half that contains player 0.
    """

    size: int
    capacity: int
    minimum: int
    sizes: int
    masks: Tensor
    seen: set[int | bytes] = field(default_factory=set)

    @property
    def fraction(self) -> float:
        return len(self.masks) / self.capacity


class LayeredSample:
    """See the module's docstring.

    Args:
        num_players: n.
        paired: draw coalitions with their complements.
        cover: every player is in and out of a coalition of each size.
        share: gives what a layer's number of draws shall be proportional to; None: the rule above.
        generator: source of the draws.

    Attributes:
        layers: one per size 1..n-1, or 1..n/2 if paired; none for a single player.
        minimum: smallest number of coalitions (pairs) that can be drawn.
        capacity: how many there are.
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
        """Draw until there are ``total`` coalitions (pairs) in all, keeping those drawn before."""
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
        return layer.sizes / math.sqrt(layer.size * (self.num_players - layer.size))

    def _draw(self, layer: Layer, count: int) -> None:
        if count > len(layer.masks) and count == layer.capacity:
            self._add(layer, self._all(layer), count)
        elif self.cover and len(layer.masks) == 0:
            self._add(layer, self._blocks(layer.size), count)
        while len(layer.masks) < count:
            sizes = torch.full((count - len(layer.masks) + 4,), layer.size)
            self._add(layer, random_coalitions(sizes, self.num_players, self.generator), count)

    def _add(self, layer: Layer, masks: Tensor, count: int) -> None:
        if self.paired and 2 * layer.size == self.num_players:
            masks = masks ^ ~masks[:, :1]
        new = []
        for position, key in enumerate(coalition_keys(masks)):
            if key not in layer.seen and len(layer.seen) < count:
                layer.seen.add(key)
                new.append(position)
        layer.masks = torch.cat([layer.masks, masks[new]])

    def _blocks(self, size: int) -> Tensor:
        short = min(size, self.num_players - size)
        order = random_permutations(1, self.num_players, self.generator)[0]
        count = -(-self.num_players // short)
        positions = (torch.arange(count)[:, None] * short + torch.arange(short)) % self.num_players
        blocks = torch.zeros(count, self.num_players, dtype=torch.bool).scatter_(1, order[positions], True)
        return blocks if short == size else ~blocks

    def _all(self, layer: Layer) -> Tensor:
        members = torch.tensor(list(itertools.combinations(range(self.num_players), layer.size)))
        members = members[torch.randperm(len(members), generator=self.generator)]
        return torch.zeros(len(members), self.num_players, dtype=torch.bool).scatter_(1, members, True)


def layer_variance(layer: Layer, influences: Tensor) -> Tensor:
    """Variance ``[n, M]`` of a layer's contribution to the estimate.

    Args:
        layer: the layer; its sampling fraction reduces the variance, to 0 if it is complete.
        influences: ``[m, n, M]``, how far each draw moves the estimate away from what it would be without sampling
            error; they sum to 0 and their squares sum to an unbiased estimate for a vanishing fraction.
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
    """Draw what the budget buys and estimate; with a target, draw half as much again until the target is met. Exact
    where the budget buys all coalitions and there is no target to stop at before, and for up to 2 players.

    Args:
        name: the estimator, for messages.
        utility: ``masks: bool [K, n] -> float [K]`` or ``[K, M]``.
        sample: what ``estimator`` reads; its minimum, beside the empty and the grand coalition, is that of the budget.
        budget: what the caller allows, see :class:`flsv.functional.shapley.layers.Sampling`.
        target_stderr: the caller's target, or None.
        estimator: values and standard errors, both ``[n, M]``, from the game and the sample as they stand.
        size_weights: of the exact value, see :func:`exact_shapley`.
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


def random_permutations(count: int, num_players: int, generator: Generator | None = None) -> Tensor:
    """``count`` independent uniform orders of the players, int ``[count, n]``."""
    return torch.rand(count, num_players, generator=generator, dtype=torch.float64).argsort(dim=1)


def random_coalitions(sizes: Tensor, num_players: int, generator: Generator | None = None) -> Tensor:
    """Independent coalitions, the k-th uniform among those of size ``sizes[k]``: int ``[K]`` -> bool ``[K, n]``.

    Example:
        >>> random_coalitions(torch.tensor([0, 2, 3]), 3).sum(dim=1).tolist()
        [0, 2, 3]
    """
    ranks = random_permutations(len(sizes), num_players, generator).argsort(dim=1)
    return ranks < sizes[:, None]


def prefixes(permutations: Tensor) -> Tensor:
    """The coalitions met along each order, without the empty and the grand one: int ``[P, n]`` -> bool ``[P, n-1, n]``.

    Example:
        >>> prefixes(torch.tensor([[2, 0, 1]])).int().tolist()
        [[[0, 0, 1], [1, 0, 1]]]
    """
    ranks = permutations.argsort(dim=1)
    return ranks[:, None, :] < torch.arange(1, permutations.shape[1])[:, None]


DEFAULT_EVALUATIONS_PER_PLAYER = 50
MIN_SAMPLES_TO_STOP = 10  # a standard error from fewer samples is too often far too small


class Sampling:
    """One call of a sampled estimator: its budget, its running estimate, and its stopping rule.

    Args:
        name: the estimator, for messages.
        utility: ``masks: bool [K, n] -> float [K]`` or ``[K, M]``.
        num_players: n.
        budget: what the caller allows, or None for 50 n (all 2^n if a target standard error decides instead).
        minimum: what the estimator needs for one unbiased estimate; never more than the 2^n there are.
        target_stderr: the caller's target, above 0, or None.

    Attributes:
        budget: the evaluations that it may spend.
        game: the utility, with a memory.

    Raises:
        ConfigurationError: a budget below the minimum, a target that is not positive, or no players.

    Example:
        >>> run = Sampling("sampler", lambda masks: masks.sum(dim=1), 3, 4, 2, None)
        >>> ends, alone = run.game.empty_and_grand(), torch.eye(3, dtype=torch.bool)
        >>> run.left, run.affordable(alone.unsqueeze(1))
        (2, 2)
        >>> Sampling("sampler", lambda masks: masks.sum(dim=1), 10, 7, 20, None)
        Traceback (most recent call last):
        ...
        flsv.utilities.errors.ConfigurationError: sampler: budget=7 is below the minimum of 20 evaluations for 10 \
players.
    """

    def __init__(
        self,
        name: str,
        utility: Utility,
        num_players: int,
        budget: int | None,
        minimum: int,
        target_stderr: float | None,
    ) -> None:
        self.game = MemoizedGame(utility, num_players)
        if target_stderr is not None:
            check_number(name, "target_stderr", target_stderr, above=0, hint="None means no target.")
        everything = 2**num_players
        minimum = min(minimum, everything)
        if budget is None:
            usual = everything if target_stderr is not None else DEFAULT_EVALUATIONS_PER_PLAYER * num_players
            budget = min(max(usual, minimum), everything)
        if budget < minimum:
            raise ConfigurationError(
                f"{name}: budget={budget} is below the minimum of {minimum} evaluations for {num_players} players."
            )
        if target_stderr is None:  # else nobody knows how many it will be
            counting.expect("coalitions", min(budget, everything))
        self.budget, self.target_stderr = budget, target_stderr

    @property
    def buys_all(self) -> bool:
        """Whether the budget pays for all coalitions, and these are few enough to enumerate."""
        return self.game.num_players <= MAX_EXACT_PLAYERS and self.budget >= 2**self.game.num_players

    @property
    def exact(self) -> bool:
        """Whether it buys them all, and there is no target to stop at before."""
        return self.target_stderr is None and self.buys_all

    @property
    def left(self) -> int:
        """Evaluations that are still to be spent."""
        return self.budget - self.game.evaluations

    def affordable(self, groups: Tensor) -> int:
        """How many of these groups of coalitions, bool ``[G, K, n]``, the remaining budget pays for, from the first
        on."""
        return int((self.game.cost(groups) <= self.left).sum())

    def reached(self, stderr: Tensor) -> bool:
        """Whether every standard error is known and at most the target."""
        return self.target_stderr is not None and bool((stderr <= self.target_stderr).all())


class Moments:
    """Running mean and standard error of independent samples, updated batch by batch (Chan et al. 1979).

    Example:
        >>> moments = Moments()
        >>> moments.add(torch.tensor([[1.0], [2.0]]))
        >>> moments.add(torch.tensor([[3.0]]))
        >>> moments.mean, moments.stderr
        (tensor([2.]), tensor([0.5774]))
    """

    def __init__(self) -> None:
        self.count = 0
        self.mean = torch.zeros(())
        self._squares = torch.zeros(())

    def add(self, samples: Tensor) -> None:
        """Take in ``samples [B, ...]``, one per row."""
        count, mean = len(samples), samples.mean(dim=0)
        shift, total = mean - self.mean, self.count + count
        self._squares = self._squares + (samples - mean).square().sum(dim=0) + shift**2 * (self.count * count / total)
        self.mean = self.mean + shift * (count / total)
        self.count = total

    @property
    def stderr(self) -> Tensor:
        """Standard error of ``mean``; NaN below two samples."""
        if self.count < 2:
            return torch.full_like(self.mean, torch.nan)
        return (self._squares / (self.count - 1) / self.count).sqrt()
