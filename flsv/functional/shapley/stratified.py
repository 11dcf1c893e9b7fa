"""Stratified sampling by coalition size: the K-subset Shapley value (Maleki et al. 2013), with shared evaluations.

Grouped by coalition size s, the Shapley value of player i in the game U of n players N is a difference of mean
utilities,

    SV_i = 1/n [ sum_{s=1..n} E[U(S) | i in S, |S| = s]  -  sum_{s=0..n-1} E[U(S) | i not in S, |S| = s] ],

which is eq. 1 of ShapleyFL with separate means of its two terms. K-subset, the baseline of Guo's paper ("randomly takes
every possible size subset, reconstructs the participant's value as his expected contribution to a K-size subset"),
samples marginal contributions U(S + i) - U(S) for one player and size at a time. With separate means (as in Stratified
SVARM; Kolpaczki et al. 2024) one coalition is a sample for all n players, and the estimate remains unbiased. All
coalitions of the sizes 0, 1, n - 1 and n are evaluated; those of other sizes are drawn as in
:mod:`flsv.functional.shapley.layers`.

The true values sum to U(N) - U(empty), the sampled values do not. The gap is divided equally among the players, which
keeps the estimate unbiased and can only reduce its squared error.
"""

from __future__ import annotations

import torch
from torch import Generator, Tensor

from flsv.functional.shapley.game import ShapleyEstimate, Utility
from flsv.functional.shapley.layers import LayeredSample, estimate_in_stages, layer_variance
from flsv.functional.shapley.memoized_game import MemoizedGame


def stratum_means(members: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Compute each player's mean over the drawn coalitions that contain it, and each draw's influence on the mean.

    Args:
        members: the m drawn coalitions, bool ``[m, n]``; every player is in at least one.
        values: the numbers to average, ``[m, M]`` for M games, or ``[m, n, M]`` if they depend on the player.

    Returns:
        Means ``[n, M]`` and influences ``[m, n, M]``. The influence of a draw on a player's mean over c draws is the
        draw's deviation from this mean, divided by c, times sqrt(c / (c - 1)), so that the squared influences sum to
        the usual unbiased variance of a mean; 0 for draws without the player. For a player with a single draw, the
        deviation is taken from the mean of all players' draws, which overestimates the variance.
    """
    weights = members.to(torch.float64).unsqueeze(-1)
    values = values.unsqueeze(1).expand(-1, members.shape[1], -1) if values.ndim == 2 else values
    count = weights.sum(dim=0)
    mean = (weights * values).sum(dim=0) / count
    center = torch.where(count > 1, mean, (weights * values).sum(dim=(0, 1)) / weights.sum())
    correction = (count / (count - 1).clamp_min(1)).sqrt() / count
    return mean, weights * (values - center) * correction


def efficient(values: Tensor, gain: Tensor) -> Tensor:
    """Shift the values of all players equally, so that they sum to the gain of the grand coalition.

    Args:
        values: ``[..., n, M]``, the players' values.
        gain: ``[M]``, the utility of the grand coalition minus that of the empty one.

    Returns:
        The shifted values, ``[..., n, M]``.
    """
    return values + (gain - values.sum(dim=-2, keepdim=True)) / values.shape[-2]


def stratified_shapley(
    utility: Utility,
    num_players: int,
    *,
    budget: int | None = None,
    generator: Generator | None = None,
    target_stderr: float | None = None,
) -> ShapleyEstimate:
    """Estimate the Shapley value from the mean utilities of coalitions with and without each player, size by size.

    Args:
        utility: the game: a function from K coalitions (masks, bool ``[K, n]``) to their utilities, float ``[K]``, or
            ``[K, M]`` for M games at once.
        num_players: the number n of players.
        budget: largest number of distinct evaluations; None: 50 n, or 2^n with ``target_stderr``. The minimum
            covers, for each player and size, a coalition with the player and one without: 48 evaluations for 10
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
        >>> stratified_shapley(square, 12, budget=100, generator=torch.Generator().manual_seed(0)).values[:3]
        tensor([12., 12., 12.], dtype=torch.float64)
    """
    sample = LayeredSample(num_players, paired=False, cover=True, generator=generator)
    return estimate_in_stages("stratified_shapley", utility, sample, budget, target_stderr, _by_size)


def _by_size(game: MemoizedGame, sample: LayeredSample) -> tuple[Tensor, Tensor]:
    """Compute Shapley values and standard errors ``[n, M]`` from a layered sample."""
    n, (empty, grand) = game.num_players, game.empty_and_grand()
    values = (grand - empty).repeat(n, 1)
    variance = torch.zeros_like(values)
    for layer in sample.layers:
        utilities = game(layer.masks) - empty  # so that the values of a constant game are exactly 0
        with_player, influence_with = stratum_means(layer.masks, utilities)
        without_player, influence_without = stratum_means(~layer.masks, utilities)
        values = values + with_player - without_player
        influences = influence_with - influence_without
        variance = variance + layer_variance(layer, influences - influences.mean(dim=1, keepdim=True))
    return efficient(values / n, grand - empty), variance.sqrt() / n
