"""Values from all 2^n coalitions, and leave-one-out values from n + 1 of them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Generator, Tensor

from flsv.functional.shapley.game import (
    MAX_EXACT_PLAYERS,
    Sampling,
    ShapleyEstimate,
    Utility,
    check_num_players,
    evaluate,
    result_dtype,
)
from flsv.utilities.errors import ConfigurationError

_CHUNK = 2**16  # masks per call of the utility: a few MB, and enough to outweigh the overhead of a call


def all_coalitions(num_players: int, start: int = 0, stop: int | None = None) -> Tensor:
    """List coalitions in the order of their numbers; bit i of a number is set if player i is in the coalition.

    Args:
        num_players: the number n of players.
        start: the number of the first coalition.
        stop: the number after that of the last coalition; None: 2^n.

    Returns:
        The coalitions' membership, bool ``[stop - start, n]``.

    Example:
        >>> all_coalitions(2).int().tolist()
        [[0, 0], [1, 0], [0, 1], [1, 1]]
    """
    numbers = torch.arange(start, 2**num_players if stop is None else stop)
    return (numbers[:, None] & (1 << torch.arange(num_players))) != 0


def semivalue_of_table(table: Tensor, weight: list[float]) -> Tensor:
    """Compute a semivalue from the table of all utilities: the weighted sum of each player's marginal contributions.

    Args:
        table: ``[2^n, M]``; row b has the utilities of coalition number b, see :func:`all_coalitions`.
        weight: n numbers; ``weight[s]`` is the weight of a marginal contribution to a coalition of size s.

    Returns:
        float64 ``[n, M]``.
    """
    num_players = len(table).bit_length() - 1
    sizes = torch.zeros(1, dtype=torch.int64)
    for _ in range(num_players - 1):
        sizes = torch.cat([sizes, sizes + 1])
    # Striking bit i out of a coalition number leaves a number below 2^(n-1) with the same other bits, in order: one
    # vector of weights serves every player.
    weights = torch.tensor(weight, dtype=torch.float64)[sizes]
    values = torch.empty(num_players, table.shape[1], dtype=torch.float64)
    for i in range(num_players):
        pairs = table.view(2 ** (num_players - 1 - i), 2, 2**i, -1)
        marginals = pairs[:, 1] - pairs[:, 0]
        values[i] = weights @ marginals.reshape(len(weights), -1)
    return values


def shapley_weights(num_players: int) -> list[float]:
    """Compute the Shapley value's weight of a coalition of size s, 1 / (n binom(n-1, s)), for s = 0..n-1."""
    return [1 / (num_players * math.comb(num_players - 1, s)) for s in range(num_players)]


def per_coalition(size_weights: Sequence[float] | None, num_players: int) -> list[float]:
    """Divide the total weight of each size s = 0..n-1 by the number binom(n-1, s) of its coalitions without one player.

    Args:
        size_weights: n total weights; None: the Shapley value's, 1/n for each size.
        num_players: the number n of players.
    """
    if size_weights is None:
        return shapley_weights(num_players)
    return [weight / math.comb(num_players - 1, s) for s, weight in enumerate(size_weights)]


def shapley_of_table(table: Tensor) -> Tensor:
    """Compute Shapley values ``[n, M]`` from a table ``[2^n, M]`` of all utilities, see :func:`semivalue_of_table`."""
    return semivalue_of_table(table, shapley_weights(len(table).bit_length() - 1))


def semivalue(utility: Utility, num_players: int, weight: list[float]) -> ShapleyEstimate:
    """Compute a semivalue exactly, by evaluating all 2^n coalitions; its standard errors are 0.

    Args:
        utility: the game.
        num_players: the number n of players.
        weight: the n weights of marginal contributions, see :func:`semivalue_of_table`.
    """
    total = 2**num_players
    answers = [
        evaluate(utility, all_coalitions(num_players, start, min(start + _CHUNK, total)))
        for start in range(0, total, _CHUNK)
    ]
    answer = answers[0] if len(answers) == 1 else torch.cat(answers)
    values = semivalue_of_table(answer.reshape(total, -1).to("cpu", torch.float64), weight).to(result_dtype(answer))
    values = values if answer.ndim == 2 else values[:, 0]
    return ShapleyEstimate(values, torch.zeros_like(values), total)


def check_enumerable(name: str, num_players: int, budget: int | None, alternatives: str) -> None:
    """Raise ConfigurationError if there are more than 22 players, or more coalitions than the budget.

    Args:
        name: the estimator's name, for the message.
        num_players: the number n of players, with 2^n coalitions.
        budget: the largest number of evaluations; None: no limit.
        alternatives: the end of the message, a sentence that names other estimators.
    """
    check_num_players(num_players)
    if num_players > MAX_EXACT_PLAYERS:
        raise ConfigurationError(
            f"{name} with {num_players} players needs 2^{num_players} = {2**num_players:,} evaluations; the limit is "
            f"{MAX_EXACT_PLAYERS} players. {alternatives}"
        )
    if budget is not None and budget < 2**num_players:
        raise ConfigurationError(
            f"{name}: budget={budget} is below the minimum of 2^{num_players} = {2**num_players} evaluations for "
            f"{num_players} players. {alternatives}"
        )


def exact_shapley(
    utility: Utility,
    num_players: int,
    *,
    budget: int | None = None,
    generator: Generator | None = None,
    target_stderr: float | None = None,
    size_weights: Sequence[float] | None = None,
) -> ShapleyEstimate:
    """Compute the Shapley value from all 2^n coalitions (ShapleyFL eq. 1, definition 4.1).

        SV_i = 1/n sum_{S not containing i} [U(S + i) - U(S)] / binom(n - 1, |S|)

    is the value of player i in the game U. The second line of the paper's definition 4.1 divides by
    ``|C| binom(|C|, |S|)``, a misprint: these weights do not sum to 1. The first line divides by
    ``|C| binom(|C| - 1, |S|)`` and is the Shapley value.

    Args:
        utility: the game: a function from K coalitions (masks, bool ``[K, n]``) to their utilities, float ``[K]``, or
            ``[K, M]`` for M games at once; it is called with up to 65,536 coalitions at once.
        num_players: the number n of players, at most 22.
        budget: largest number of evaluations, at least 2^n; None: no limit.
        generator: not used; it is here because every estimator takes it.
        target_stderr: not used, since the standard error is 0.
        size_weights: the n weights of another semivalue, see :mod:`flsv.functional.shapley.semivalues`; None: those of
            the Shapley value.

    Returns:
        The estimate: ``values``, ``[n]`` or ``[n, M]``, ``stderr`` 0, and 2^n ``evaluations``.

    Raises:
        ConfigurationError: there are more than 22 players or none, or the budget is below 2^n.
        ValueError: a utility is NaN or infinite, or ``utility`` returns a wrong shape.

    Example:
        The glove game: player 0 owns a left glove, players 1 and 2 a right one; a pair is worth 1.

        >>> glove = lambda masks: (masks[:, 0] & (masks[:, 1] | masks[:, 2])).float()
        >>> exact_shapley(glove, 3).values
        tensor([0.6667, 0.1667, 0.1667])
    """
    alternatives = "Use surrogate_shapley or permutation_shapley with a budget."
    check_enumerable("exact_shapley", num_players, budget, alternatives)
    return semivalue(utility, num_players, per_coalition(size_weights, num_players))


def leave_one_out(
    utility: Utility,
    num_players: int,
    *,
    budget: int | None = None,
    generator: Generator | None = None,
    target_stderr: float | None = None,
) -> ShapleyEstimate:
    r"""Compute the leave-one-out value U(N) - U(N \ {i}) of each player i, with U the game and N all players.

    Args:
        utility: the game: a function from K coalitions (masks, bool ``[K, n]``) to their utilities, float ``[K]``, or
            ``[K, M]`` for M games at once.
        num_players: the number n of players.
        budget: largest number of distinct evaluations, at least n + 1; None: n + 1.
        generator: not used; it is here because every estimator takes it.
        target_stderr: not used, since the standard error is 0.

    Returns:
        The estimate: ``values``, ``[n]`` or ``[n, M]``, ``stderr`` 0, and n + 1 ``evaluations``.

    Raises:
        ConfigurationError: the budget is below n + 1, or there is no player.
        ValueError: a utility is NaN or infinite, or ``utility`` returns a wrong shape.

    Example:
        >>> glove = lambda masks: (masks[:, 0] & (masks[:, 1] | masks[:, 2])).float()
        >>> leave_one_out(glove, 3).values
        tensor([1., 0., 0.])
    """
    game = Sampling("leave_one_out", utility, num_players, budget, num_players + 1, target_stderr).game
    everybody = torch.ones(1, num_players, dtype=torch.bool)
    utilities = game(torch.cat([everybody, ~torch.eye(num_players, dtype=torch.bool)]))
    values = utilities[0] - utilities[1:]
    return game.estimate(values, torch.zeros_like(values))
