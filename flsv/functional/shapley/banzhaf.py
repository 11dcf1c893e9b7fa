"""The Banzhaf value: a player's mean marginal contribution over all coalitions, with equal weights.

Banzhaf, "Weighted Voting Doesn't Work", 1965; Wang and Jia, "Data Banzhaf: A Robust Data Valuation Framework for
Machine Learning", AISTATS 2023.
"""

from __future__ import annotations

import torch
from torch import Generator, Tensor

from flsv.functional.shapley.budget import MIN_SAMPLES_TO_STOP, Sampling
from flsv.functional.shapley.enumeration import check_enumerable, semivalue
from flsv.functional.shapley.game import ShapleyEstimate, Utility
from flsv.functional.shapley.memoized_game import MemoizedGame
from flsv.functional.shapley.stratified import stratum_means


def banzhaf(
    utility: Utility,
    num_players: int,
    *,
    budget: int | None = None,
    generator: Generator | None = None,
    target_stderr: float | None = None,
) -> ShapleyEstimate:
    """Compute the Banzhaf value, exactly or by maximum sample reuse.

        BV_i = 2^-(n-1) sum_{S not containing i} [U(S + i) - U(S)] = E[U(S) | i in S] - E[U(S) | i not in S],  S uniform

    with BV_i the value of player i in the game U. All coalitions have the same weight, which makes the Banzhaf value
    the semivalue most robust to noise in the utility. It does not satisfy efficiency.

    Without a target the value is exact if the budget is None or at least 2^n, for up to 22 players. Otherwise it is
    estimated by maximum sample reuse (MSR): coalitions are drawn uniformly, and each is a sample for every player, in
    one of the two means. Departures from MSR as published: coalitions are distinct, and the first two are complements,
    so that every player has a coalition with it and one without.

    Args:
        utility: the game: a function from K coalitions (masks, bool ``[K, n]``) to their utilities, float ``[K]``, or
            ``[K, M]`` for M games at once.
        num_players: the number n of players, at most 22 if there is neither a budget nor a target.
        budget: largest number of distinct evaluations, at least 2; None: 2^n.
        generator: the random generator that draws the coalitions; None: torch's default.
        target_stderr: sample coalitions, and stop once every standard error is at most this number, in the utility's
            unit; None: no target.

    Returns:
        The estimate: ``values`` and ``stderr``, ``[n]`` or ``[n, M]``; ``stderr`` is 0 for exact values.

    Raises:
        ConfigurationError: the budget is below 2; there are more than 22 players and neither a budget nor a target;
            ``target_stderr`` is not above 0; or there is no player.
        ValueError: a utility is NaN or infinite, or ``utility`` returns a wrong shape.

    Example:
        >>> majority = lambda masks: (masks.sum(dim=1) >= 2).float()
        >>> banzhaf(majority, 3).values
        tensor([0.5000, 0.5000, 0.5000])
    """
    if budget is None and target_stderr is None:
        check_enumerable("banzhaf", num_players, None, "Give a budget to estimate it by maximum sample reuse.")
        budget = 2**num_players
    run = Sampling("banzhaf", utility, num_players, budget, 2, target_stderr)
    if run.exact:
        return semivalue(utility, num_players, [0.5 ** (num_players - 1)] * num_players)

    game, most = run.game, min(run.budget, 2**num_players)  # there are 2^n coalitions in all
    target, masks = most, torch.empty(0, num_players, dtype=torch.bool)
    while True:
        if target_stderr is not None:
            target = min(most, max(2 * MIN_SAMPLES_TO_STOP, len(masks) + len(masks) // 2))
        masks = _extend(game, masks, target, generator)
        values, stderr = _msr(masks, game(masks), len(masks) / 2**num_players)
        if len(masks) >= most or run.reached(stderr):
            return game.estimate(values, stderr)


def _extend(game: MemoizedGame, masks: Tensor, total: int, generator: Generator | None) -> Tensor:
    """Draw and evaluate coalitions until there are ``total``."""
    while len(masks) < total:
        new = torch.rand(total - len(masks) + 64, game.num_players, generator=generator) < 0.5
        if len(masks) == 0:
            new[1] = ~new[0]
        fresh = game.cost(new.unsqueeze(1)).diff(prepend=torch.zeros(1, dtype=torch.int64)) > 0
        new = new[fresh][: total - len(masks)]
        game(new)
        masks = torch.cat([masks, new])
    return masks


def _msr(masks: Tensor, utilities: Tensor, fraction: float) -> tuple[Tensor, Tensor]:
    """Compute Banzhaf values by maximum sample reuse."""
    inside, influence_inside = stratum_means(masks, utilities)
    outside, influence_outside = stratum_means(~masks, utilities)
    variance = (influence_inside.square() + influence_outside.square()).sum(dim=0) * (1 - fraction)
    if len(masks) < 4:
        variance = torch.full_like(variance, 0.0 if fraction == 1 else torch.nan)
    return inside - outside, variance.sqrt()
