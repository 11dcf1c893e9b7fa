"""Permutation sampling: marginal contributions along random orders of the players, plain, truncated and guided."""

from __future__ import annotations

import torch
from torch import Generator, Tensor

from flsv.functional.shapley.exact import exact_shapley
from flsv.functional.shapley.game import MemoizedGame, Sampling, ShapleyEstimate, Utility
from flsv.utilities.declared import Count, NonNegative, checked


def random_permutations(count: int, num_players: int, generator: Generator | None = None) -> Tensor:
    """Draw independent uniform orders of the n players, int ``[count, n]``."""
    # In float64 ties, which would favor low indices, have a probability below 1e-10 for a thousand players.
    return torch.rand(count, num_players, generator=generator, dtype=torch.float64).argsort(dim=1)


def random_coalitions(
    sizes: Tensor, num_players: int, generator: Generator | None = None
) -> Tensor:
    """Draw independent coalitions of the given sizes ``[K]``, bool ``[K, n]``. All coalitions of a size are equally
    likely.
    """
    ranks = random_permutations(len(sizes), num_players, generator).argsort(dim=1)
    return ranks < sizes[:, None]


def prefixes(permutations: Tensor) -> Tensor:
    """List the proper prefixes of each order as coalitions, bool ``[P, n-1, n]``: its first 1, 2, ..., n - 1
    players.
    """
    ranks = permutations.argsort(dim=1)
    return ranks[:, None, :] < torch.arange(1, permutations.shape[1])[:, None]


class Moments:
    """Running mean and standard error of independent samples (Chan et al. 1979)."""

    def __init__(self) -> None:
        self.count = 0
        self.mean = torch.zeros(())
        self._squares = torch.zeros(())

    def add(self, samples: Tensor) -> None:
        """Add a batch of samples ``[B, ...]``."""
        count, mean = len(samples), samples.mean(dim=0)
        shift, total = mean - self.mean, self.count + count
        self._squares = (
            self._squares
            + (samples - mean).square().sum(dim=0)
            + shift**2 * (self.count * count / total)
        )
        self.mean = self.mean + shift * (count / total)
        self.count = total

    @property
    def stderr(self) -> Tensor:
        """Compute the standard error of ``mean``. NaN below two samples."""
        if self.count < 2:
            return torch.full_like(self.mean, torch.nan)
        return (self._squares / (self.count - 1) / self.count).sqrt()


_MAX_BATCH = 2**16  # coalitions per batch


def marginals_along(
    game: MemoizedGame, permutations: Tensor, truncation: float | Tensor | None = None
) -> Tensor:
    """Compute all players' marginal contributions along orders ``[P, n]``, float64 ``[P, n, M]``. Contributions are 0
    once an order's utility is within ``truncation`` of the grand coalition's.
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
) -> ShapleyEstimate:
    """Estimate the Shapley value by mean marginal contributions over random orders.

    The value of a player is the mean, over all orders, of its contribution to the players before it (Castro et al.
    2009). An order and its reverse form an antithetic pair, in which the effects of few and of many predecessors
    cancel. The standard error treats pairs as independent samples. With ``truncation`` this is TMC (Ghorbani and Zou
    2019), whose bias is at most ``truncation`` for each player and not in the standard error.

    Args:
        utility: the game, from masks bool ``[K, n]`` to utilities ``[K]``, or ``[K, M]`` for M games at once.
        num_players: the number n of players.
        antithetic: whether to draw each order together with its reverse.
        truncation: truncate an order once its utility differs from the grand coalition's by at most this number, in the
            utility's unit and in each of the M games: the remaining players get 0 (TMC). None: never.
        num_permutations: the largest number of orders, such as pFedSV's 3 n, rounded up to an even number with
            ``antithetic``. None: as many as the budget suffices for.
        budget: largest number of distinct evaluations. None: 50 n, or no limit with
            ``num_permutations``. The minimum covers one pair of orders, 2 n evaluations, or with
            ``antithetic=False`` one order, n + 1.
        generator: the random generator that draws the orders. None: torch's default.

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
    group = 2 if antithetic else 1
    if num_permutations is not None and budget is None:
        budget = 2**num_players
    run = Sampling(
        "permutation_shapley", utility, num_players, budget, 2 + group * (num_players - 1)
    )
    if truncation is None and num_permutations is None and run.buys_all:
        return exact_shapley(utility, num_players)
    # More orders than the budget has evaluations only repeat coalitions.
    most = -(-(run.budget if num_permutations is None else num_permutations) // group)
    moments, pairs = _sample_orders(run, group, most, generator, truncation)
    stderr = moments.stderr
    if pairs < 2 and num_players > 2:  # repeats of the first pair are no further samples
        stderr = torch.full_like(stderr, torch.nan)
    return run.estimate(moments.mean, stderr)


def _sample_orders(
    run: Sampling,
    group: int,
    most: int,
    generator: Generator | None,
    truncation: float | None,
) -> tuple[Moments, int]:
    """Sample up to ``most`` groups of ``group`` orders within the budget. Return the moments of the marginal
    contributions and the number of distinct groups.
    """
    moments, different, affordable, n = Moments(), set[tuple[int, ...]](), 0, run.num_players
    per_group = max(group * (n - 1), 1)
    run.empty_and_grand()
    while moments.count < most:
        # As many groups as the budget suffices for even if all their coalitions are new, and then some to try.
        safe = most if run.budget >= 2**n else run.left // per_group
        batch = min(
            max(safe, 2 * affordable, 8), most - moments.count, max(_MAX_BATCH // per_group, 1)
        )
        orders = random_permutations(batch, n, generator)
        if group == 2:
            orders = torch.stack([orders, orders.flip(1)], dim=1).flatten(0, 1)
        affordable = batch if batch <= safe else run.affordable(prefixes(orders).view(batch, -1, n))
        if affordable:
            taken = orders[: affordable * group]
            samples = marginals_along(run, taken, truncation)
            moments.add(samples.view(-1, group, *samples.shape[1:]).mean(dim=1))
            first = taken[
                ::group
            ]  # of a pair, the order that begins with the lower player stands for both
            first = torch.where(
                (first[:, :1] <= first[:, -1:]) | (group == 1), first, first.flip(1)
            )
            different.update(map(tuple, first.tolist()))
        # Without truncation the number of evaluations is exact: the first pair beyond the budget ends the sampling.
        if affordable == 0 or (truncation is None and affordable < batch):
            break
    return moments, len(different)


_MIN_ORDERS, _LAST = 30, 10


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

    Each player comes first in equally many orders (guided), since first contributions are the largest. An order is
    truncated once its utility is close to that of the grand coalition: the order's remaining players get 0 (Liu et al.,
    ACM TIST 2022). Departures: thresholds are relative, since the paper's suit accuracies only, and each cycle takes
    first players in a random order.

    Args:
        utility: the game, from masks bool ``[K, n]`` to utilities ``[K]``, or ``[K, M]`` for M games at once. An order
            or a round is truncated if all M games are within the threshold.
        num_players: the number n of players.
        truncation: the largest difference from the grand coalition's utility at which an order is truncated (the
            paper's epsilon_i), relative to the larger of the absolute utilities of the empty and the grand coalition.
            None: orders are not truncated.
        round_truncation: the largest difference between the utilities of the empty and the grand coalition at which all
            values are 0 (the paper's epsilon_b), relative to the same number. None: values are always estimated.
        convergence: stop once each of the last 10 running means of the values differs from the present one by less than
            this number (relative, averaged over the players). None: sample until the budget is spent.
        budget: largest number of distinct evaluations. None: 50 n. The minimum is one
            order, n + 1 evaluations.
        generator: the random generator that draws the orders. None: torch's default.

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
    game = Sampling("gtg_shapley", utility, num_players, budget, num_players + 1)
    empty, grand = game.empty_and_grand()
    size = torch.maximum(grand.abs(), empty.abs())
    if round_truncation is not None and bool(
        ((grand - empty).abs() <= round_truncation * size).all()
    ):
        zeros = torch.zeros(num_players, len(grand), dtype=torch.float64)
        return game.estimate(zeros, torch.full_like(zeros, torch.nan))

    close = None if truncation is None else truncation * size
    samples = torch.empty(0, num_players, len(grand), dtype=torch.float64)
    leaders = torch.empty(0, dtype=torch.int64)
    while len(samples) < game.budget:  # more orders than evaluations only repeat coalitions
        cycles = (
            1
            if convergence is not None
            else max(game.left // max(num_players * (num_players - 1), 1), 1)
        )
        orders = _guided(num_players, cycles, generator)
        affordable = game.affordable(prefixes(orders))
        if affordable:
            samples = torch.cat([samples, marginals_along(game, orders[:affordable], close)])
            leaders = torch.cat([leaders, orders[:affordable, 0]])
        if affordable < len(orders) and (affordable == 0 or truncation is None):
            break
        if convergence is not None and _converged(samples, convergence):
            break
    return game.estimate(samples.mean(dim=0), _stderr(samples, leaders))


def _guided(num_players: int, cycles: int, generator: Generator | None) -> Tensor:
    """Draw orders int ``[cycles * n, n]`` in which every player is first once per cycle."""
    leaders = random_permutations(cycles, num_players, generator).view(-1, 1)
    others = random_permutations(len(leaders), num_players, generator)
    others = others[others != leaders].view(len(leaders), num_players - 1)
    return torch.cat([leaders, others], dim=1)


def _converged(samples: Tensor, threshold: float) -> bool:
    """Return whether the running mean of marginal contributions has converged, by the rule of the authors' code."""
    if len(samples) < max(_MIN_ORDERS, samples.shape[1]):
        return False
    recent = samples.cumsum(dim=0)[-_LAST - 1 :] / torch.arange(
        len(samples) - _LAST, len(samples) + 1
    ).view(-1, 1, 1)
    change = (recent[:-1] - recent[-1]).abs() / recent[-1].abs().clamp_min(1e-12)
    return bool((change.mean(dim=1) < threshold).all())


def _stderr(samples: Tensor, leaders: Tensor) -> Tensor:
    """Compute the standard error of mean marginal contributions over orders whose first players are ``leaders``."""
    # It pools the spread among orders with the same first player, and adds the effect of an incomplete last cycle.
    count, num_players = samples.shape[:2]
    led = torch.zeros(num_players, dtype=torch.float64).index_add_(
        0, leaders, torch.ones(count, dtype=torch.float64)
    )
    freedom = count - int((led > 0).sum())
    if count < 2 or freedom < 2:
        return torch.full(
            samples.shape[1:], 0.0 if num_players == 1 else torch.nan, dtype=torch.float64
        )
    totals = torch.zeros(num_players, *samples.shape[1:], dtype=torch.float64).index_add_(
        0, leaders, samples
    )
    means = totals / led.clamp_min(1).view(-1, 1, 1)
    within = (samples - means[leaders]).square().sum(dim=0) / freedom
    rest = count % num_players
    between = (
        means.var(dim=0) * rest * (1 - rest / num_players) if rest and bool((led > 0).all()) else 0
    )
    return (within / count + between / count**2).sqrt()
