"""Permutation sampling: marginal contributions along permutations of the players, plain, truncated and guided."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Generator, Tensor

from flsv.functional.shapley.exact import exact_shapley
from flsv.functional.shapley.game import MemoizedGame, Sampling, ShapleyEstimate, Utility
from flsv.utilities.declared import Count, NonNegative, checked


def random_permutations(
    count: int,
    num_players: int,
    generator: Generator | None = None,
) -> Tensor:
    """Draw independent uniform permutations of the n players, int ``[count, n]``."""
    # In float64 ties, which would favor low indices, have a probability below 1e-10 for a thousand players.
    numbers = torch.rand(count, num_players, generator=generator, dtype=torch.float64)
    return numbers.argsort(dim=1)


def random_coalitions(
    sizes: Tensor,
    num_players: int,
    generator: Generator | None = None,
) -> Tensor:
    """Draw independent coalitions of the given sizes ``[K]``, bool ``[K, n]``. All coalitions of a size are equally
    likely.
    """
    ranks = random_permutations(len(sizes), num_players, generator).argsort(dim=1)
    return ranks < sizes[:, None]


def prefixes(permutations: Tensor) -> Tensor:
    """List the proper prefixes of each permutation as coalitions, bool ``[P, n-1, n]``: its first 1, 2, ..., n - 1
    players.
    """
    num_players = permutations.shape[1]
    ranks = permutations.argsort(dim=1)
    sizes = torch.arange(1, num_players)
    return ranks[:, None, :] < sizes[:, None]


class Moments:
    """Running mean and standard error of independent samples (Chan et al. 1979)."""

    count = 0

    def __init__(self) -> None:
        self.mean = torch.zeros(())
        self._squares = torch.zeros(())

    def add(self, samples: Tensor) -> None:
        """Add a batch of samples ``[B, ...]``."""
        # The mean of all samples, and the sum of squared deviations from it.
        num_known = self.count
        num_new = len(samples)
        total = num_known + num_new
        new_mean = samples.mean(dim=0)
        shift = new_mean - self.mean

        squares_within = (samples - new_mean).square().sum(dim=0)
        squares_between = shift**2 * (num_known * num_new / total)
        self._squares = self._squares + squares_within + squares_between
        self.mean = self.mean + shift * (num_new / total)
        self.count = total

    @property
    def stderr(self) -> Tensor:
        """Compute the standard error of ``mean``. NaN below two samples."""
        if self.count < 2:
            return torch.full_like(self.mean, torch.nan)
        variance = self._squares / (self.count - 1)
        return (variance / self.count).sqrt()


_COALITIONS_PER_BATCH = 2**16
_MIN_BATCH = 8  # groups of permutations


def marginals_along(
    game: MemoizedGame,
    permutations: Tensor,
    truncation: float | Tensor | None = None,
) -> Tensor:
    """Compute all players' marginal contributions along permutations ``[P, n]``, float64 ``[P, n, M]``. They are 0 once
    a permutation's utility is within ``truncation`` of the grand coalition's.
    """
    # The utility along each permutation, from the empty coalition to all players: [P, n + 1, M].
    num_permutations, num_players = permutations.shape
    empty_utility, grand_utility = game.empty_and_grand()
    path_utilities = empty_utility.repeat(num_permutations, num_players + 1, 1)
    path_utilities[:, -1] = grand_utility
    masks = prefixes(permutations)  # [P, n - 1, n], of the first 1 to n - 1 players
    if truncation is None:
        path_utilities[:, 1:-1] = game(masks)
    else:
        _fill_truncated(path_utilities, game, masks, grand=grand_utility, truncation=truncation)

    # Step i of a permutation belongs to its i-th player. Return them in the players' order, [P, n, M].
    steps = path_utilities.diff(dim=1)
    players = permutations.unsqueeze(-1).expand_as(steps)
    marginals = torch.empty_like(steps)
    return marginals.scatter_(1, players, steps)


def _fill_truncated(
    path_utilities: Tensor,
    game: MemoizedGame,
    masks: Tensor,
    *,
    grand: Tensor,
    truncation: float | Tensor,
) -> None:
    """Fill in utilities along permutations until they are close to the grand coalition's."""
    num_players = masks.shape[-1]
    untruncated = torch.arange(len(path_utilities))  # rows of the paths
    for size in range(num_players):
        utilities = path_utilities[untruncated, size]  # of the first `size` players
        gap = (grand - utilities).abs()
        is_close = (gap <= truncation).all(dim=1)

        # The utilities of a truncated permutation stay equal, so that its later players contribute 0.
        truncated = untruncated[is_close]
        path_utilities[truncated, size + 1 :] = utilities[is_close].unsqueeze(1)
        untruncated = untruncated[~is_close]
        if len(untruncated) == 0 or size + 1 == num_players:
            return
        # The masks begin with one player: those at position `size` have one player more.
        larger_coalitions = masks[untruncated, size]
        path_utilities[untruncated, size + 1] = game(larger_coalitions)


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
) -> ShapleyEstimate:
    """Estimate the Shapley value by mean marginal contributions over random permutations.

    The value of a player is the mean, over all permutations, of its contribution to the players before it (Castro et
    al. 2009). A permutation and its reverse form an antithetic pair, in which the effects of few and of many
    predecessors cancel. The standard error treats pairs as independent samples. With ``truncation`` this is TMC
    (Ghorbani and Zou 2019), whose bias is at most ``truncation`` for each player and not in the standard error.

    Args:
        utility: the game, from masks bool ``[K, n]`` to utilities ``[K]``, or ``[K, M]`` for M games at once.
        num_players: the number n of players.
        antithetic: whether to draw each permutation together with its reverse.
        truncation: truncate a permutation once its utility differs from the grand coalition's by at most this number,
            in the utility's unit and in each of the M games: the remaining players get 0 (TMC). None: never.
        num_permutations: the largest number of permutations, such as pFedSV's 3 n, rounded up to an even number with
            ``antithetic``. None: as many as the budget suffices for.
        budget: largest number of distinct evaluations. None: 50 n, or no limit with
            ``num_permutations``. The minimum covers one pair of permutations, 2 n evaluations, or with
            ``antithetic=False`` one permutation, n + 1.
        generator: the random generator that draws the permutations. None: torch's default.

    Returns:
        The estimate: ``values`` and ``stderr``, ``[n]`` or ``[n, M]``. The values are exact, with stderr 0, if the
        budget suffices for all coalitions, unless ``truncation`` or
        ``num_permutations`` is given.

    Raises:
        ConfigurationError: the budget is below the minimum, an argument is out of range, or there is no player.
        ValueError: a utility is NaN or infinite, or ``utility`` returns a wrong shape.

    Example:
        >>> airport = lambda masks: -(masks * torch.tensor([1.0, 2.0, 4.0])).amax(dim=1)
        >>> permutation_shapley(airport, 3, num_permutations=2000, generator=torch.Generator().manual_seed(0)).values
        tensor([-0.3160, -0.8375, -2.8465])
    """
    if num_permutations is not None and budget is None:
        budget = 2**num_players  # no limit: there are no more coalitions
    group_size = 2 if antithetic else 1
    # The empty and the grand coalition, and in each permutation of a group those of 1 to n - 1 players.
    minimum = 2 + group_size * (num_players - 1)
    game = Sampling("permutation_shapley", utility, num_players, budget, minimum)
    if truncation is None and num_permutations is None and game.can_evaluate_all:
        return exact_shapley(utility, num_players)

    groups = _PermutationGroups(game, group_size, generator, truncation)
    # More permutations than the budget has evaluations only repeat coalitions.
    groups.draw_samples(max_permutations=num_permutations or game.budget)
    return game.estimate(groups.moments.mean, groups.stderr())


@dataclass
class _PermutationGroups:
    """Samples of Shapley values, one for each drawn group: a permutation, or an antithetic pair."""

    game: Sampling
    group_size: int
    generator: Generator | None
    truncation: float | None
    moments: Moments = field(default_factory=Moments)
    distinct_groups: set[tuple[int, ...]] = field(default_factory=set)

    @property
    def cost_of_group(self) -> int:
        """Count the coalitions of a group, but the empty and the grand one."""
        return max(self.group_size * (self.game.num_players - 1), 1)

    def draw_samples(self, max_permutations: int) -> None:
        """Sample groups until they have ``max_permutations``, rounded up, or the budget is spent."""
        max_groups = (max_permutations + self.group_size - 1) // self.group_size
        max_batch = max(_COALITIONS_PER_BATCH // self.cost_of_group, 1)
        num_sampled = 0  # in the last batch
        self.game.empty_and_grand()  # evaluated first, so that the budget that is left is for others
        while self.moments.count < max_groups:
            num_safe = self._num_safe_groups(max_groups)
            num_wanted = max(num_safe, 2 * num_sampled, _MIN_BATCH)
            num_missing = max_groups - self.moments.count
            batch_size = min(num_wanted, num_missing, max_batch)
            groups = self._draw_groups(batch_size)
            coalitions = _coalitions_of_groups(groups)
            num_sampled = self.game.affordable(coalitions)
            if num_sampled > 0:
                self._add(groups[:num_sampled])
            if _is_budget_spent(num_sampled, batch_size, self.truncation):
                break

    def _num_safe_groups(self, max_groups: int) -> int:
        """Return for how many groups the budget suffices even if all their coalitions are new. Further ones may fit."""
        if self.game.budget >= 2**self.game.num_players:
            return max_groups
        return self.game.left // self.cost_of_group

    def _draw_groups(self, count: int) -> Tensor:
        """Draw groups of permutations, int ``[count, group_size, n]``."""
        permutations = random_permutations(count, self.game.num_players, self.generator)
        if self.group_size == 1:
            return permutations[:, None]
        reversed_permutations = permutations.flip(1)
        return torch.stack([permutations, reversed_permutations], dim=1)

    def _add(self, groups: Tensor) -> None:
        """Add the mean marginal contributions of each group."""
        permutations = groups.flatten(0, 1)
        samples = marginals_along(self.game, permutations, self.truncation)
        samples_by_group = samples.unflatten(0, groups.shape[:2])
        self.moments.add(samples_by_group.mean(dim=1))
        # Both permutations of a pair are drawn equally often. The one with the lower first player represents it.
        for group in groups.tolist():
            self.distinct_groups.add(min(map(tuple, group)))

    def stderr(self) -> Tensor:
        """Compute the standard errors ``[n, M]``. NaN below two distinct groups, since repetitions tell nothing new."""
        if len(self.distinct_groups) < 2 and self.game.num_players > 2:
            return torch.full_like(self.moments.mean, torch.nan)
        return self.moments.stderr


def _coalitions_of_groups(groups: Tensor) -> Tensor:
    """Return the proper prefixes of each group's permutations, bool ``[G, K, n]``."""
    permutations = groups.flatten(0, 1)
    coalitions = prefixes(permutations)
    coalitions_by_group = coalitions.unflatten(0, groups.shape[:2])
    return coalitions_by_group.flatten(1, 2)


def _is_budget_spent(num_affordable: int, num_drawn: int, truncation: object) -> bool:
    """Return whether sampling ends after a batch of which only ``num_affordable`` fitted into the budget."""
    if truncation is not None:
        return num_affordable == 0
    # The number of evaluations is exact, so the next group would exceed the budget.
    return num_affordable < num_drawn


_MIN_PERMUTATIONS = 30
_NUM_COMPARED_MEANS = 10


@checked
def gtg_shapley(
    utility: Utility,
    num_players: int,
    *,
    truncation: NonNegative | None = 0.001,
    round_truncation: NonNegative | None = 0.01,
    convergence: NonNegative | None = 0.05,
    budget: int | None = None,
    generator: Generator | None = None,
) -> ShapleyEstimate:
    """Estimate the Shapley value by GTG-Shapley.

    Each player comes first in equally many permutations (guided), since first contributions are the largest. A
    permutation is truncated once its utility is close to that of the grand coalition: its remaining players get 0 (Liu
    et al., ACM TIST 2022). Departures: thresholds are relative, since the paper's are suitable for accuracies only, and
    the first players of a cycle are in random order.

    Args:
        utility: the game, from masks bool ``[K, n]`` to utilities ``[K]``, or ``[K, M]`` for M games at once. A
            permutation or a round is truncated if all M games are within the threshold.
        num_players: the number n of players.
        truncation: the largest difference from the grand coalition's utility at which a permutation is truncated (the
            paper's epsilon_i), relative to the larger of the absolute utilities of the empty and the grand coalition.
            None: permutations are not truncated.
        round_truncation: the largest difference between the utilities of the empty and the grand coalition at which all
            values are 0 (the paper's epsilon_b), relative to the same number. None: values are always estimated.
        convergence: stop once each of the last 10 running means of the values differs from the present one by less than
            this number (relative, averaged over the players). None: sample until the budget is spent.
        budget: largest number of distinct evaluations. None: 50 n. The minimum is one
            permutation, n + 1 evaluations.
        generator: the random generator that draws the permutations. None: torch's default.

    Returns:
        The estimate: ``values`` and ``stderr``, ``[n]`` or ``[n, M]``. In a truncated round the values are 0,
        ``stderr`` is NaN, and there are 2 evaluations.

    Raises:
        ConfigurationError: the budget is below the minimum, a threshold is negative, or there is no player.
        ValueError: a utility is NaN or infinite, or ``utility`` returns a wrong shape.

    Example:
        >>> flat = lambda masks: 0.5 + 0.001 * masks.float().mean(dim=1)
        >>> gtg_shapley(flat, 4).values, gtg_shapley(flat, 4).evaluations
        (tensor([0., 0., 0., 0.]), 2)
    """
    game = Sampling("gtg_shapley", utility, num_players, budget, minimum=num_players + 1)
    empty, grand = game.empty_and_grand()
    magnitude = torch.maximum(grand.abs(), empty.abs())
    gap = (grand - empty).abs()
    if round_truncation is not None and (gap <= round_truncation * magnitude).all():
        zeros = torch.zeros(num_players, len(grand), dtype=torch.float64)
        return game.estimate(zeros, torch.full_like(zeros, torch.nan))

    tolerance = None
    if truncation is not None:
        tolerance = truncation * magnitude
    samples, leaders = _sample_guided(game, tolerance, convergence, generator)
    stderr = _stderr_of_mean(samples, leaders)
    return game.estimate(samples.mean(dim=0), stderr)


def _sample_guided(
    game: Sampling,
    tolerance: Tensor | None,
    convergence: float | None,
    generator: Generator | None,
) -> tuple[Tensor, Tensor]:
    """Return marginal contributions ``[P, n, M]`` along guided permutations, and who comes first in each, ``[P]``."""
    samples: list[Tensor] = []
    leaders: list[Tensor] = []
    num_sampled = 0
    while num_sampled < game.budget:  # more permutations only repeat coalitions
        num_cycles = _num_cycles(game, convergence)
        permutations = _guided_permutations(game.num_players, num_cycles, generator)
        num_affordable = game.affordable(prefixes(permutations))
        if num_affordable > 0:
            sampled_permutations = permutations[:num_affordable]
            samples.append(marginals_along(game, sampled_permutations, tolerance))
            leaders.append(sampled_permutations[:, 0])
            num_sampled += num_affordable
        if _is_budget_spent(num_affordable, len(permutations), tolerance):
            break
        if convergence is not None and _has_converged(torch.cat(samples), convergence):
            break
    return torch.cat(samples), torch.cat(leaders)


def _num_cycles(game: Sampling, convergence: float | None) -> int:
    """Return how many cycles of n permutations to draw at once: one if convergence is checked after each."""
    if convergence is not None:
        return 1
    cost_of_cycle = max(game.num_players * (game.num_players - 1), 1)
    return max(game.left // cost_of_cycle, 1)


def _guided_permutations(
    num_players: int,
    num_cycles: int,
    generator: Generator | None,
) -> Tensor:
    """Draw permutations int ``[num_cycles * n, n]`` in which every player is first once per cycle."""
    # In a cycle of n permutations each player leads once: leaders [num_cycles * n, 1].
    leaders = random_permutations(num_cycles, num_players, generator).view(-1, 1)
    num_permutations = len(leaders)
    permutations = random_permutations(num_permutations, num_players, generator)
    is_follower = permutations != leaders
    followers = permutations[is_follower].view(num_permutations, num_players - 1)
    return torch.cat([leaders, followers], dim=1)


def _has_converged(samples: Tensor, threshold: float) -> bool:
    """Return whether the running mean of marginal contributions has converged, by the rule of the authors' code."""
    count, num_players = samples.shape[:2]
    if count < max(_MIN_PERMUTATIONS, num_players):
        return False
    # The last running means, of these numbers of permutations, are compared with the final mean, relative to it.
    counts = torch.arange(count - _NUM_COMPARED_MEANS, count + 1)
    sums = samples.cumsum(dim=0)
    last_sums = sums[-len(counts) :]
    running_means = last_sums / counts.view(-1, 1, 1)  # [means, n, M]
    final_mean = running_means[-1]
    distances = (running_means[:-1] - final_mean).abs()
    relative_distances = distances / final_mean.abs().clamp_min(1e-12)  # not 0 / 0
    is_close = relative_distances.mean(dim=1) < threshold
    return bool(is_close.all())


def _stderr_of_mean(samples: Tensor, leaders: Tensor) -> Tensor:
    """Compute the standard error of mean marginal contributions over permutations that begin with ``leaders``."""
    # The variance is pooled over permutations with the same leader, the first player. That of an incomplete last cycle
    # is added.
    count, num_players = samples.shape[:2]
    shape = samples.shape[1:]  # [n, M]
    counts = torch.bincount(leaders, minlength=num_players)  # [n], by leader
    has_led = counts > 0
    degrees_of_freedom = count - int(has_led.sum())
    if degrees_of_freedom < 2:
        if num_players == 1:  # its value is exact
            return torch.zeros(shape, dtype=torch.float64)
        return torch.full(shape, torch.nan, dtype=torch.float64)

    sums = samples.new_zeros(num_players, *shape)
    sums.index_add_(0, leaders, samples)
    means = sums / counts.clamp_min(1).view(-1, 1, 1)  # [n, n, M], by leader
    squares = (samples - means[leaders]).square()
    pooled_variance = squares.sum(dim=0) / degrees_of_freedom
    variance = pooled_variance / count
    if has_led.all():
        variance = variance + _variance_of_last_cycle(means, count)
    return variance.sqrt()


def _variance_of_last_cycle(means: Tensor, count: int) -> Tensor:
    """Return what an incomplete last cycle adds to the variance, from the leaders' ``means [n, n, M]``."""
    num_players = len(means)
    num_in_last_cycle = count % num_players  # r
    if num_in_last_cycle == 0:
        return torch.zeros(())
    # In each cycle every player leads once. The last cycle has r of the n leaders, drawn without replacement. The sum
    # of r means has the variance s^2 r (1 - r / n), with s^2 the variance between the leaders' means.
    share_missing = 1 - num_in_last_cycle / num_players
    variance_of_sum = means.var(dim=0) * num_in_last_cycle * share_missing
    return variance_of_sum / count**2
