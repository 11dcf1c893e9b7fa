"""Beta Shapley: the semivalue whose weights of coalition sizes come from a Beta distribution.

Kwon and Zou, "Beta Shapley: a Unified and Noise-reduced Data Valuation Framework for Machine Learning", AISTATS 2022.

**Duplicates.** Small coalitions seldom contain both copies of a player that appears twice with the same data. The more
weight small coalitions have, the more such a player gains. An example is a game of four owners of overlapping data,
where U is 1 - 2^-k for k distinct owners in the coalition. Each owner has a share of 0.25. If one of them appears
twice, its two copies together have 0.33 under Shapley, 0.39 under Beta(16, 1) and 0.29 under Banzhaf (two copies
together have exactly the single player's Banzhaf value), but 0.17 under Beta(1, 4) and 0 under leave-one-out. If paid
clients might appear twice, use the Banzhaf value, or beta above alpha.
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
    """Compute the total weight q_s of the coalitions of size s = 0..n-1 that a player joins.

        q_s = binom(n - 1, s) p_s,    p_s = B(s + beta, n - 1 - s + alpha) / B(alpha, beta),    B the Beta function

    with p_s the weight of each single coalition of size s.

    Args:
        num_players: the number n of players.
        alpha: the first parameter of the Beta distribution, above 0.
        beta: its second parameter, above 0.

    Returns:
        The n weights, which sum to 1.

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
    """Compute the Beta(alpha, beta)-Shapley value, exactly if the budget suffices for all coalitions.

        phi_i = sum_{S not containing i} p_{|S|} [U(S + i) - U(S)]

    with phi_i the value of player i in the game U, and the weights p of :func:`beta_weights`. Beta(1, 1) is the Shapley
    value. alpha > beta gives more weight to small coalitions, where a contribution is large compared with the noise of
    the utility; beta > alpha gives more weight to large ones (for beta towards infinity the value is leave-one-out).
    The value satisfies efficiency for alpha = beta = 1 only.

    It is estimated as in :func:`stratified_shapley`, from mean utilities by coalition size with and without each
    player; with the weights q of :func:`beta_weights`,

        phi_i = sum_{s=1..n} q_{s-1} E[U(S) | i in S, |S| = s] - sum_{s=0..n-1} q_s E[U(S) | i not in S, |S| = s].

    Departure: the paper samples marginal contributions of one player at a time and stops by a convergence rule. Here a
    coalition is a sample for all players, and the numbers of draws per size minimize the variance of the estimate if
    the variance of the utilities is the same at all sizes.

    Args:
        utility: the game: a function from K coalitions (masks, bool ``[K, n]``) to their utilities, float ``[K]``, or
            ``[K, M]`` for M games at once.
        num_players: the number n of players.
        alpha: the first parameter of the Beta distribution, above 0. The paper takes alpha = 16 and beta = 1 for data
            with label noise; alpha = 1 and beta = 4 are robust to duplicates.
        beta: its second parameter, above 0.
        budget: largest number of distinct evaluations; None: 50 n, or 2^n with ``target_stderr``. The minimum
            covers, for each player and size, a coalition with the player and one without: 48 evaluations for 10
            players, in general about 2 n (1 + log n).
        generator: the random generator that draws the coalitions; None: torch's default.
        target_stderr: stop once every standard error is at most this number, in the utility's unit; None: no target.

    Returns:
        The estimate: ``values`` (unbiased) and ``stderr``, ``[n]`` or ``[n, M]``.

    Raises:
        ConfigurationError: alpha or beta is not above 0; the budget is below the minimum, which the message names;
            ``target_stderr`` is not above 0; or there is no player.
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
            utilities = game(layer.masks) - empty  # so that the values of a constant game are exactly 0
            inside, influence_inside = stratum_means(layer.masks, utilities)
            outside, influence_outside = stratum_means(~layer.masks, utilities)
            joined, left = weights[layer.size - 1], weights[layer.size]
            values = values + joined * inside - left * outside
            variance = variance + layer_variance(layer, joined * influence_inside - left * influence_outside)
        return values, variance.sqrt()

    sample = LayeredSample(n, paired=False, cover=True, share=share, generator=generator)
    return estimate_in_stages(name, utility, sample, budget, target_stderr, estimator, weights)
