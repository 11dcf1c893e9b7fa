"""Beta Shapley: the semivalue with weights of coalition sizes from a Beta distribution.

Kwon and Zou, "Beta Shapley: a Unified and Noise-reduced Data Valuation Framework for Machine Learning", AISTATS 2022.

**Duplicates.** The more weight small coalitions have, which seldom contain a player's copy, the more a player gains by
appearing twice with the same data. In a game of overlapping data (U = 1 - product of 1/2 for each distinct owner, four
owners) the share of such a player rises from 0.25 to 0.33 under Shapley, 0.39 under Beta(16, 1) and 0.29 under Banzhaf
(two copies together have exactly the single player's Banzhaf value), and falls to 0.17 under Beta(1, 4) and 0 under
leave-one-out. To pay clients that might appear twice, take beta above alpha, or Banzhaf.
"""

from __future__ import annotations

import math

import torch
from torch import Generator, Tensor

from flsv.functional.shapley.game import ShapleyEstimate, Utility, check_num_players
from flsv.functional.shapley.layers import Layer, LayeredSample, estimate_in_stages, layer_variance
from flsv.functional.shapley.memoized_game import MemoizedGame
from flsv.functional.shapley.stratified import stratum_means
from flsv.utilities.declared import Positive, checked


def beta_weights(num_players: int, alpha: float, beta: float) -> list[float]:
    """Compute the total weight q_s of the coalitions of size s = 0..n-1 that a player joins; they sum to 1.

        q_s = binom(n - 1, s) p_s,    p_s = B(s + beta, n - 1 - s + alpha) / B(alpha, beta),    B the Beta function

    Args:
        num_players: the number n of players.
        alpha: the Beta distribution's parameter, above 0.
        beta: the other one, above 0.

    Example:
        >>> beta_weights(4, 1, 1)
        [0.25, 0.25, 0.25, 0.25]
        >>> [round(weight, 3) for weight in beta_weights(4, 16, 1)]
        [0.842, 0.14, 0.017, 0.001]
    """

    def log_beta(a: float, b: float) -> float:
        return math.lgamma(a) + math.lgamma(b) - math.lgamma(a + b)

    n = num_players
    # binom(n - 1, s) = 1 / (n B(s + 1, n - s))
    logs = [log_beta(s + beta, n - 1 - s + alpha) - log_beta(s + 1, n - s) for s in range(n)]
    weights = [math.exp(log - max(logs)) for log in logs]
    return [weight / sum(weights) for weight in weights]


@checked
def beta_shapley(
    utility: Utility,
    num_players: int,
    *,
    alpha: Positive = 16.0,
    beta: Positive = 1.0,
    budget: int | None = None,
    generator: Generator | None = None,
    target_stderr: float | None = None,
) -> ShapleyEstimate:
    """Compute the Beta(alpha, beta)-Shapley value, exactly if the budget buys all coalitions.

        phi_i = sum_{S not containing i} p_{|S|} [U(S + i) - U(S)]

    with p of :func:`beta_weights`. Beta(1, 1) is the Shapley value; alpha > beta gives more weight to small coalitions,
    where a contribution is largest against the noise of the utility, and beta > alpha to large ones (beta towards
    infinity is leave-one-out). It satisfies efficiency for alpha = beta = 1 only. Sampled as ``stratified`` is: by
    coalition size, means with and without each player,

        phi_i = sum_{s=1..n} q_{s-1} E[U(S) | i in S, |S| = s] - sum_{s=0..n-1} q_s E[U(S) | i not in S, |S| = s].

    Departure: the paper samples marginal contributions of one player at a time and stops by a convergence rule; here a
    coalition serves all players, and the numbers of draws per size minimize the variance if utilities spread equally at
    all sizes.

    Args:
        utility: the game: a function from K coalitions (masks, bool ``[K, n]``) to their utilities, float ``[K]``, or
            ``[K, M]`` for M games at once.
        num_players: the number n of players.
        alpha: above 0. 16, with beta 1, is the paper's choice for data with label noise; 1 and 1 are Shapley's; 1 and 4
            are robust to duplicates.
        beta: above 0.
        budget: largest number of distinct evaluations, default 50 n. The minimum lets every player be in and out of a
            coalition of every size: 48 for 10 players, about 2 n (1 + log n) in general.
        generator: the random generator that draws the coalitions; None: torch's default.
        target_stderr: stop as soon as every standard error is at most this number, in the utility's unit.

    Returns:
        ``values`` and ``stderr`` ``[n]`` or ``[n, M]``; unbiased.

    Raises:
        ConfigurationError: alpha or beta not above 0; a budget below the minimum, which is named.
        ValueError: a utility is NaN or infinite, or ``utility`` returns a wrong shape.

    Example:
        >>> glove = lambda masks: (masks[:, 0] & (masks[:, 1] | masks[:, 2])).double()
        >>> beta_shapley(glove, 3, alpha=4, beta=1).values
        tensor([0.3333, 0.1333, 0.1333], dtype=torch.float64)
    """
    name = "beta_shapley"
    check_num_players(num_players)
    n, weights = num_players, beta_weights(num_players, alpha, beta)

    def share(layer: Layer) -> float:
        s = layer.size
        inside, outside = weights[s - 1], weights[s]
        return max(math.sqrt(inside**2 * n / s + outside**2 * n / (n - s)), 1e-12)

    def estimator(game: MemoizedGame, sample: LayeredSample) -> tuple[Tensor, Tensor]:
        empty, grand = game.empty_and_grand()
        values = (weights[-1] * (grand - empty)).repeat(n, 1)
        variance = torch.zeros_like(values)
        for layer in sample.layers:
            utilities = game(layer.masks) - empty  # a constant game gives exact zeros
            inside, influence_inside = stratum_means(layer.masks, utilities)
            outside, influence_outside = stratum_means(~layer.masks, utilities)
            joined, left = weights[layer.size - 1], weights[layer.size]
            values = values + joined * inside - left * outside
            variance = variance + layer_variance(layer, joined * influence_inside - left * influence_outside)
        return values, variance.sqrt()

    sample = LayeredSample(n, paired=False, cover=True, share=share, generator=generator)
    return estimate_in_stages(name, utility, sample, budget, target_stderr, estimator, weights)
