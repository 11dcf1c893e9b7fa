"""Permutation sampling: the Shapley value from random orders of the players (Castro et al. 2009).

The Shapley value of a player is the mean, over all n! orders of n players, of its marginal contribution to the players
before it. An order and its reverse form an antithetic pair: a player that is early in the order is late in the reverse,
so that the effects of few and of many predecessors cancel within the pair. The mean over pairs is unbiased and
satisfies efficiency exactly. The standard error treats the pairs as independent samples; its degrees of freedom are the
number of distinct pairs minus one. (With two or three pairs, two standard errors would be far too narrow an interval.)

With ``truncation`` this is the truncated Monte Carlo (TMC) of Ghorbani and Zou (2019), a baseline of ShapleyFL's table
3 and of Guo's paper: once the utility of the coalition along an order is within ``truncation`` of the grand
coalition's utility, the remaining players get 0 for that order. The bias is at most ``truncation`` for each player, and
the standard error does not include it.

Orders are processed in batches. A batch takes one call of the utility for all its coalitions or, with truncation, one
call per position for the next coalition of every unfinished order.
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

_MAX_BATCH = 2**16  # coalitions per batch


def marginals_along(
    game: MemoizedGame,
    permutations: Tensor,
    truncation: float | Tensor | None = None,
    size_weights: Sequence[float] | None = None,
) -> Tensor:
    """Compute the marginal contributions of all players along given orders of the players.

    With ``size_weights`` q, the contribution of a player that joins s others is multiplied by n q_s. A player has each
    position with probability 1/n, so the mean over random orders is the semivalue with the weights q.

    Args:
        game: the memoized game.
        permutations: int ``[P, n]``, the orders of the n players.
        truncation: as for :func:`permutation_shapley`; a tensor ``[M]`` has one threshold for each of M games.
        size_weights: the n weights q of a semivalue; None: those of the Shapley value.

    Returns:
        float64 ``[P, n, M]``; entry (p, i) is the contribution of player i along order p.
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
            # The contributions of the later players of a truncated order are 0.
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
    """Estimate the Shapley value by each player's mean marginal contribution over random orders of the players.

    Args:
        utility: the game: a function from K coalitions (masks, bool ``[K, n]``) to their utilities, float ``[K]``, or
            ``[K, M]`` for M games at once.
        num_players: the number n of players.
        antithetic: whether to draw each order together with its reverse.
        truncation: truncate an order once its utility differs from the grand coalition's by at most this number, in the
            utility's unit and in each of the M games: the remaining players get 0 (TMC). None: never.
        num_permutations: the largest number of orders, such as pFedSV's 3 n, rounded up to an even number with
            ``antithetic``; None: as many as the budget suffices for.
        budget: largest number of distinct evaluations; None: 50 n, 2^n with ``target_stderr``, or no limit with
            ``num_permutations``. The minimum covers one pair of orders, 2 n evaluations, or with
            ``antithetic=False`` one order, n + 1.
        generator: the random generator that draws the orders; None: torch's default.
        target_stderr: stop once every standard error is at most this number, in the utility's unit; None: no target.
        size_weights: the n weights of another semivalue, see :mod:`flsv.functional.shapley.semivalues`; None: those of
            the Shapley value.

    Returns:
        The estimate: ``values`` and ``stderr``, ``[n]`` or ``[n, M]``. The values are exact, with stderr 0, if the
        budget suffices for all coalitions, unless ``target_stderr`` is reached before, or ``truncation`` or
        ``num_permutations`` is given.

    Raises:
        ConfigurationError: the budget is below the minimum, an argument is out of range, or there is no player.
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
    if different < 2 and num_players > 2:  # repeats of the first pair are no further samples
        stderr = torch.full_like(stderr, torch.nan)
    return run.game.estimate(walk.moments.mean, stderr, max(different - 1, 1))


class _Walk:
    """Evaluation of groups of random orders until the budget is spent or the target is reached."""

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
        """Draw and evaluate groups until there are ``most``, or the budget or target ends it."""
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
            # Without truncation the number of evaluations is exact: the first pair beyond the budget ends the sampling.
            if affordable == 0 or (self.truncation is None and affordable < batch):
                return
            if self.moments.count >= MIN_SAMPLES_TO_STOP and self.run.reached(self.moments.stderr):
                return

    def _safe(self) -> int:
        """Count the groups that the budget suffices for even if all their coalitions are new."""
        return self.most if self.run.budget >= 2**self.run.game.num_players else self.run.left // self._per_group

    def _batch(self, safe: int, affordable: int) -> int:
        """Choose how many groups to draw in the next batch."""
        batch = min(max(safe, 2 * affordable, 8), self.most - self.moments.count, max(_MAX_BATCH // self._per_group, 1))
        if self.run.target_stderr is not None:
            batch = min(batch, max(self.moments.count, MIN_SAMPLES_TO_STOP))
        return batch

    def _orders(self, groups: int, generator: Generator | None) -> Tensor:
        """Draw the orders int ``[groups * group, n]``."""
        orders = random_permutations(groups, self.run.game.num_players, generator)
        return orders if self.group == 1 else torch.stack([orders, orders.flip(1)], dim=1).flatten(0, 1)

    def _add(self, orders: Tensor) -> None:
        """Add each group's mean marginal contributions to :attr:`moments`."""
        samples = marginals_along(self.run.game, orders, self.truncation, self.size_weights)
        self.moments.add(samples.view(-1, self.group, *samples.shape[1:]).mean(dim=1))
        self.different.update(map(tuple, _representatives(orders, self.group).tolist()))


def _representatives(orders: Tensor, group: int) -> Tensor:
    """Choose one order per group, the same for groups with the same orders."""
    first = orders[::group]
    return torch.where(first[:, :1] <= first[:, -1:], first, first.flip(1)) if group == 2 else first
