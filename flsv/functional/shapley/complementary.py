r"""Stratified complementary contributions (Zhang et al., SIGMOD 2023), the estimator of ShapleyFL's reference code.

The complementary contribution of a coalition S of the n players N in the game U is CC(S) = U(S) - U(N \ S). The
Shapley value of player i is the mean over coalition sizes s of mean complementary contributions,

    SV_i = 1/n sum_{s=1..n} E[CC(S) | i in S, |S| = s],

so that one pair of evaluations is a sample for every player: CC(S) for the members of S, at size s, and -CC(S) for the
other players, at size n - s. (The algorithm 3 that ShapleyFL describes is a different estimator, see
:mod:`flsv.functional.shapley.difference`; ShapleyFL's code runs the estimator of this module.)

Pairs are distinct and drawn as in :mod:`flsv.functional.shapley.layers`: all coalitions of the sizes 1 and n - 1, and
for every player and size a pair with the player on either side. Zhang et al. draw with replacement and allocate the
draws to sizes by Neyman's rule in a second stage; here the allocation is the fixed rule derived in ``layers``, which
needs no pilot sample. The difference between U(N) - U(empty) and the sum of the estimates is divided equally among the
players, which leaves the estimates unbiased and can only reduce their squared error.
"""

from __future__ import annotations

import torch
from torch import Generator, Tensor

from flsv.functional.shapley.game import ShapleyEstimate, Utility
from flsv.functional.shapley.layers import LayeredSample, estimate_in_stages, layer_variance
from flsv.functional.shapley.memoized_game import MemoizedGame
from flsv.functional.shapley.stratified import efficient, stratum_means


def complementary_shapley(
    utility: Utility,
    num_players: int,
    *,
    budget: int | None = None,
    generator: Generator | None = None,
    target_stderr: float | None = None,
) -> ShapleyEstimate:
    """Estimate the Shapley value by mean complementary contributions.

    The complementary contribution of a coalition is its utility minus that of all other players. A player's value
    is the mean over the drawn coalitions of one size that contain the player, averaged over the sizes.

    Args:
        utility: the game: a function from K coalitions (masks, bool ``[K, n]``) to their utilities, float ``[K]``, or
            ``[K, M]`` for M games at once.
        num_players: the number n of players.
        budget: largest number of distinct evaluations; None: 50 n, or 2^n with ``target_stderr``. The minimum
            covers, for each player and size, a coalition with the player and its complement: 50 evaluations for 10
            players, in general about 2 n (1 + log n).
        generator: the random generator that draws the coalitions; None: torch's default.
        target_stderr: stop once every standard error is at most this number, in the utility's unit; None: no target.

    Returns:
        The estimate: ``values`` and ``stderr``, ``[n]`` or ``[n, M]``. The values are exact, with stderr 0, if the
        budget suffices for all coalitions, unless ``target_stderr`` is reached before.

    Raises:
        ConfigurationError: the budget is below the minimum, which the message names; ``target_stderr`` is not above 0;
            or there is no player.
        ValueError: a utility is NaN or infinite, or ``utility`` returns a wrong shape.

    Example:
        >>> square = lambda masks: masks.sum(dim=1).double() ** 2
        >>> complementary_shapley(square, 12, budget=100, generator=torch.Generator().manual_seed(0)).values[:3]
        tensor([12., 12., 12.], dtype=torch.float64)
    """
    sample = LayeredSample(num_players, paired=True, cover=True, generator=generator)
    return estimate_in_stages("complementary_shapley", utility, sample, budget, target_stderr, _by_side)


def _by_side(game: MemoizedGame, sample: LayeredSample) -> tuple[Tensor, Tensor]:
    """Compute Shapley values and standard errors ``[n, M]`` from pairs of coalitions."""
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
    return efficient(values / n, grand - empty), variance.sqrt() / n
