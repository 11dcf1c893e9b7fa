"""Permutation sampling: the Shapley value from random orders of the players (Castro et al. 2009).

The Shapley value is the mean over all n! orders of the player's marginal contribution to those before it. An order and
its reverse form an antithetic pair: a player that comes early in one comes late in the other, so that the effects of
few and of many predecessors cancel within the pair. The mean over pairs is unbiased and satisfies efficiency exactly.
The pairs are the independent samples of the standard error, with one degree of freedom less than there are different
pairs; for two or three pairs an interval of two standard errors is far too narrow.

With ``truncation`` this is the truncated Monte Carlo (TMC) of Ghorbani and Zou (2019), a baseline of ShapleyFL's table
3 and of Guo's paper: once the coalition along an order is within ``truncation`` of the grand coalition's utility, the
remaining players get 0 for that order. This has a bias of up to ``truncation`` for each player, which the standard
error does not include.

Orders are processed in batches: all their prefixes (or, with truncation, the next prefix of every unfinished order) are
one call of the utility.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Generator, Tensor

from flsv.functional.shapley.budget import MIN_SAMPLES_TO_STOP, Sampling
from flsv.functional.shapley.enumeration import all_coalitions, per_coalition, semivalue_of_table
from flsv.functional.shapley.exact import exact_shapley
from flsv.functional.shapley.game import ShapleyEstimate, Utility
from flsv.functional.shapley.memoized_game import MemoizedGame
from flsv.functional.shapley.moments import Moments
from flsv.functional.shapley.random_coalitions import prefixes, random_permutations
from flsv.utilities.declared import Count, NonNegative, checked

_MAX_BATCH = 2**16  # prefixes per batch


def marginals_along(
    game: MemoizedGame,
    permutations: Tensor,
    truncation: float | Tensor | None = None,
    size_weights: Sequence[float] | None = None,
) -> Tensor:
    """Compute the marginal contributions of all players along given orders.

    With ``size_weights`` q the contribution of a player that joins s others is multiplied by n q_s: all places are
    equally likely, so that the mean over random orders is the semivalue with these weights.

    Args:
        game: the memoized game.
        permutations: int ``[P, n]``, the orders.
        truncation: as for :func:`permutation_shapley`, or ``[M]``, one per column of the utility.
        size_weights: n numbers q; None: the Shapley value's.

    Returns:
        float64 ``[P, n, M]``, by the players' numbers.
    """
    count, num_players = permutations.shape
    empty, grand = game.empty_and_grand()
    path = empty.repeat(count, num_players + 1, 1)
    path[:, -1] = grand
    masks = prefixes(permutations)
    if truncation is None:
        path[:, 1:-1] = game(masks)
    else:
        running = torch.arange(count)
        for position in range(num_players):
            close = ((grand - path[running, position]).abs() <= truncation).all(dim=1)
            # No player gets the rest of a truncated order: the later players' contributions are 0.
            path[running[close], position + 1 :] = path[running[close], position].unsqueeze(1)
            running = running[~close]
            if len(running) == 0:
                break
            if position + 1 < num_players:
                path[running, position + 1] = game(masks[running, position])
    steps = path.diff(dim=1)
    if size_weights is not None:
        steps = steps * num_players * torch.tensor(size_weights, dtype=torch.float64)[:, None]
    return torch.empty_like(steps).scatter_(1, permutations.unsqueeze(-1).expand_as(steps), steps)


@checked
def permutation_shapley(
    utility: Utility,
    num_players: int,
    *,
    antithetic: bool = True,
    truncation: NonNegative | None = None,
    num_permutations: Count | None = None,
    budget: int | None = None,
    generator: Generator | None = None,
    target_stderr: float | None = None,
    size_weights: Sequence[float] | None = None,
) -> ShapleyEstimate:
    """Estimate the Shapley value by mean marginal contributions over random orders of the players.

    Args:
        utility: the game: a function from K coalitions (masks, bool ``[K, n]``) to their utilities, float ``[K]``, or
            ``[K, M]`` for M games at once.
        num_players: the number n of players.
        antithetic: draw each order together with its reverse.
        truncation: stop an order once every column of the utility is within this of the grand coalition's, in the
            utility's unit (TMC). None never stops.
        num_permutations: walk this many orders (rounded up to pairs) unless the budget ends first. pFedSV asks for 3 n.
        budget: largest number of distinct evaluations. The minimum is what one pair may cost, 2 n (n + 1 if not
            antithetic). Default 50 n, or no limit if ``num_permutations`` is given.
        generator: source of the orders.
        target_stderr: stop as soon as every standard error is at most this number, in the utility's unit.
        size_weights: the n weights of another semivalue, see :mod:`flsv.functional.shapley.semivalues`; None: those of
            the Shapley value.

    Returns:
        ``values`` and ``stderr`` ``[n]`` or ``[n, M]``. The exact value, stderr 0, where the budget buys all coalitions
        unless ``truncation`` or ``num_permutations`` is given.

    Raises:
        ConfigurationError: a budget below the minimum, or an argument out of range.
        ValueError: a utility is NaN or infinite, or ``utility`` returns a wrong shape.

    Example:
        >>> airport = lambda masks: -(masks * torch.tensor([1.0, 2.0, 4.0])).amax(dim=1)
        >>> permutation_shapley(airport, 3, num_permutations=2000, generator=torch.Generator().manual_seed(0)).values
        tensor([-0.3160, -0.8375, -2.8465])
    """
    name, group = "permutation_shapley", 2 if antithetic else 1
    if num_permutations is not None and budget is None:
        budget = 2**num_players
    run = Sampling(name, utility, num_players, budget, 2 + group * (num_players - 1), target_stderr)
    may_be_exact = truncation is None and num_permutations is None and run.buys_all
    if may_be_exact and target_stderr is None:
        return exact_shapley(utility, num_players, size_weights=size_weights)
    # More orders than the budget has evaluations only repeat coalitions.
    most = -(-(run.budget if num_permutations is None else num_permutations) // group)
    walk = _Walk(run, group, most, truncation, size_weights)
    walk.go(generator)
    if may_be_exact and not run.reached(walk.moments.stderr):
        weight = per_coalition(size_weights, num_players)
        values = semivalue_of_table(run.game(all_coalitions(num_players)), weight)
        return run.game.estimate(values, torch.zeros_like(values))
    stderr, different = walk.moments.stderr, len(walk.different)
    if different < 2 and num_players > 2:  # repeats of the first pair are one sample, however often
        stderr = torch.full_like(stderr, torch.nan)
    return run.game.estimate(walk.moments.mean, stderr, max(different - 1, 1))


class _Walk:
    """A walk over groups of orders (one order, or one and its reverse) until budget or target end it.

    Args:
        run: budget, game and target.
        group: 2 for pairs.
        most: the largest number of groups.
        truncation: see :func:`permutation_shapley`.
        size_weights: see :func:`permutation_shapley`.

    Attributes:
        moments: mean and standard error over the groups' mean marginal contributions ``[n, M]``.
        different: an order of each distinct group.
    """

    def __init__(
        self,
        run: Sampling,
        group: int,
        most: int,
        truncation: float | None,
        size_weights: Sequence[float] | None,
    ) -> None:
        self.run, self.group, self.most = run, group, most
        self.truncation, self.size_weights = truncation, size_weights
        self.moments = Moments()
        self.different: set[tuple[int, ...]] = set()
        self._per_group = max(group * (run.game.num_players - 1), 1)

    def go(self, generator: Generator | None) -> None:
        """Walk all groups, or as many as the budget buys or the target needs."""
        self.run.game.empty_and_grand()
        affordable = 0
        while self.moments.count < self.most:
            safe = self._safe()
            batch = self._batch(safe, affordable)
            orders = self._orders(batch, generator)
            affordable = batch
            if batch > safe:
                affordable = self.run.affordable(prefixes(orders).view(batch, -1, orders.shape[1]))
            if affordable:
                self._add(orders[: affordable * self.group])
            # Without truncation the price was exact and the first pair that does not fit ends the sampling.
            if affordable == 0 or (self.truncation is None and affordable < batch):
                return
            if self.moments.count >= MIN_SAMPLES_TO_STOP and self.run.reached(self.moments.stderr):
                return

    def _safe(self) -> int:
        """Count the groups that the budget buys even if every prefix is new."""
        return self.most if self.run.budget >= 2**self.run.game.num_players else self.run.left // self._per_group

    def _batch(self, safe: int, affordable: int) -> int:
        """Choose how many groups to draw next; ``affordable`` of the last batch were walked."""
        batch = min(max(safe, 2 * affordable, 8), self.most - self.moments.count, max(_MAX_BATCH // self._per_group, 1))
        if self.run.target_stderr is not None:
            batch = min(batch, max(self.moments.count, MIN_SAMPLES_TO_STOP))
        return batch

    def _orders(self, groups: int, generator: Generator | None) -> Tensor:
        """Draw the orders of so many groups."""
        orders = random_permutations(groups, self.run.game.num_players, generator)
        return orders if self.group == 1 else torch.stack([orders, orders.flip(1)], dim=1).flatten(0, 1)

    def _add(self, orders: Tensor) -> None:
        """Add the marginal contributions along the orders of whole groups."""
        samples = marginals_along(self.run.game, orders, self.truncation, self.size_weights)
        self.moments.add(samples.view(-1, self.group, *samples.shape[1:]).mean(dim=1))
        self.different.update(map(tuple, _representatives(orders, self.group).tolist()))


def _representatives(orders: Tensor, group: int) -> Tensor:
    """Choose one order ``[P, n]`` per group, the same one for an order and its reverse if groups are pairs."""
    first = orders[::group]
    return torch.where(first[:, :1] <= first[:, -1:], first, first.flip(1)) if group == 2 else first
