"""GTG-Shapley: guided truncation between and within rounds (Liu et al., ACM TIST 2022).

U is the utility, N the grand coalition of all n players, and the *size* of the utility is the larger of
``abs(U(empty))`` and ``abs(U(N))``.

- *Between rounds*: if ``abs(U(N) - U(empty))`` is at most ``round_truncation`` times the size, every value is 0, and
  only the empty and the grand coalition are evaluated.
- *Guided sampling*: orders of the players are drawn in cycles of n orders, in which each player comes first once, so
  that the first marginal contributions, which are the largest, are sampled equally often for all players.
- *Within a round*: once the utility along an order differs from U(N) by at most ``truncation`` times the size, the
  remaining players of this order get 0.
- *Convergence*: after at least max(30, n) orders, sampling stops as soon as each of the last 10 running means of the
  values differs from the present one by less than ``convergence`` (relative, averaged over the players), as in the
  authors' code.

Both truncations bias the values, by up to these fractions of the size. With both None, only the convergence rule biases
them. Departures: the thresholds are relative, whereas the paper's are in units of accuracy, which do not suit a loss
(no round changes a loss of 0.005 by 0.01). And each cycle takes the first players in a fresh random order, not in the
order of their numbers, so that a budget that is spent within a cycle does not favor a player.

The standard error pools the spread among orders with the same first player, and includes the effect of an incomplete
last cycle, in which not all players come first equally often.
"""

from __future__ import annotations

import torch
from torch import Generator, Tensor

from flsv.functional.shapley.budget import Sampling
from flsv.functional.shapley.game import ShapleyEstimate, Utility
from flsv.functional.shapley.permutation import marginals_along
from flsv.functional.shapley.random_coalitions import prefixes, random_permutations
from flsv.utilities.declared import NonNegative, checked

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
    target_stderr: float | None = None,
) -> ShapleyEstimate:
    """Estimate the Shapley value by GTG-Shapley: mean marginal contributions over random orders of the players.

    Each player comes first in equally many orders (guided). An order is truncated once its utility is close to that of
    the grand coalition: the order's remaining players get 0.

    Args:
        utility: the game: a function from K coalitions (masks, bool ``[K, n]``) to their utilities, float ``[K]``, or
            ``[K, M]`` for M games at once; an order or a round is truncated if all M games are within the threshold.
        num_players: the number n of players.
        truncation: the largest difference from the grand coalition's utility at which an order is truncated (the
            paper's epsilon_i), relative to the larger of the absolute utilities of the empty and the grand coalition;
            None: orders are not truncated.
        round_truncation: the largest difference between the utilities of the empty and the grand coalition at which all
            values are 0 (the paper's epsilon_b), relative to the same number; None: values are always estimated.
        convergence: stop once each of the last 10 running means of the values differs from the present one by less than
            this number (relative, averaged over the players); None: sample until the budget is spent.
        budget: largest number of distinct evaluations; None: 50 n, or 2^n with ``target_stderr``. The minimum is one
            order, n + 1 evaluations.
        generator: the random generator that draws the orders; None: torch's default.
        target_stderr: stop once every standard error is at most this number, in the utility's unit; None: no target.

    Returns:
        The estimate: ``values`` and ``stderr``, ``[n]`` or ``[n, M]``. In a truncated round the values are 0,
        ``stderr`` is NaN, and there are 2 evaluations.

    Raises:
        ConfigurationError: the budget is below the minimum, a threshold is negative, ``target_stderr`` is not above 0,
            or there is no player.
        ValueError: a utility is NaN or infinite, or ``utility`` returns a wrong shape.

    Example:
        >>> flat = lambda masks: 0.5 + 0.001 * masks.float().mean(dim=1)
        >>> gtg_shapley(flat, 4).values, gtg_shapley(flat, 4).evaluations
        (tensor([0., 0., 0., 0.]), 2)
    """
    run = Sampling("gtg_shapley", utility, num_players, budget, num_players + 1, target_stderr)
    game = run.game
    empty, grand = game.empty_and_grand()
    size = torch.maximum(grand.abs(), empty.abs())
    if round_truncation is not None and bool(((grand - empty).abs() <= round_truncation * size).all()):
        zeros = torch.zeros(num_players, len(grand), dtype=torch.float64)
        return game.estimate(zeros, torch.full_like(zeros, torch.nan))

    close = None if truncation is None else truncation * size
    samples = torch.empty(0, num_players, len(grand), dtype=torch.float64)
    leaders = torch.empty(0, dtype=torch.int64)
    while len(samples) < run.budget:  # more orders than evaluations only repeat coalitions
        cycles = max(run.left // max(num_players * (num_players - 1), 1), 1)
        if convergence is not None or target_stderr is not None:
            cycles = 1
        orders = _guided(num_players, cycles, generator)
        affordable = run.affordable(prefixes(orders))
        if affordable:
            samples = torch.cat([samples, marginals_along(game, orders[:affordable], close)])
            leaders = torch.cat([leaders, orders[:affordable, 0]])
        if affordable < len(orders) and (affordable == 0 or truncation is None):
            break
        if convergence is not None and _converged(samples, convergence):
            break
        if target_stderr is not None and run.reached(_stderr(samples, leaders)):
            break
    return game.estimate(samples.mean(dim=0), _stderr(samples, leaders))


def _guided(num_players: int, cycles: int, generator: Generator | None) -> Tensor:
    """Draw orders int ``[cycles * n, n]`` in which every player is first once per cycle."""
    leaders = random_permutations(cycles, num_players, generator).view(-1, 1)
    others = random_permutations(len(leaders), num_players, generator)
    others = others[others != leaders].view(len(leaders), num_players - 1)
    return torch.cat([leaders, others], dim=1)


def _converged(samples: Tensor, threshold: float) -> bool:
    """Return whether the running mean of marginal contributions has converged."""
    if len(samples) < max(_MIN_ORDERS, samples.shape[1]):
        return False
    recent = samples.cumsum(dim=0)[-_LAST - 1 :] / torch.arange(len(samples) - _LAST, len(samples) + 1).view(-1, 1, 1)
    change = (recent[:-1] - recent[-1]).abs() / recent[-1].abs().clamp_min(1e-12)
    return bool((change.mean(dim=1) < threshold).all())


def _stderr(samples: Tensor, leaders: Tensor) -> Tensor:
    """Compute the standard error of the mean of marginal contributions."""
    count, num_players = samples.shape[:2]
    led = torch.zeros(num_players, dtype=torch.float64).index_add_(0, leaders, torch.ones(count, dtype=torch.float64))
    freedom = count - int((led > 0).sum())
    if count < 2 or freedom < 2:
        return torch.full(samples.shape[1:], 0.0 if num_players == 1 else torch.nan, dtype=torch.float64)
    totals = torch.zeros(num_players, *samples.shape[1:], dtype=torch.float64).index_add_(0, leaders, samples)
    means = totals / led.clamp_min(1).view(-1, 1, 1)
    within = (samples - means[leaders]).square().sum(dim=0) / freedom
    rest = count % num_players
    between = means.var(dim=0) * rest * (1 - rest / num_players) if rest and bool((led > 0).all()) else 0
    return (within / count + between / count**2).sqrt()
