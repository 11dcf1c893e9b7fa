"""Enumeration of all 2^n coalitions of a game, and semivalues of the table of their utilities.

Coalition number b contains player i iff bit i of b is set. Viewed as ``[high bits, bit i, low bits]``, the table of
utilities holds U(S) and U(S + i) side by side for all S at once: n subtractions of 2^(n-1) numbers each are the whole
computation, and a null player's value is exactly 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from flsv.functional.shapley.game import ShapleyEstimate, Utility, check_num_players, evaluate, result_dtype
from flsv.utilities.errors import ConfigurationError

MAX_EXACT_PLAYERS = 22
_CHUNK = 2**16  # masks per call of the utility: a few MB, and utilities have per-call overhead


def all_coalitions(num_players: int, start: int = 0, stop: int | None = None) -> Tensor:
    """List the membership masks of coalitions number ``start``..``stop - 1``; bit i is player i.

    Args:
        num_players: the number n of players.
        start: the first number.
        stop: behind the last number; None: 2^n.

    Returns:
        bool ``[stop - start, n]``.

    Example:
        >>> all_coalitions(2).int().tolist()
        [[0, 0], [1, 0], [0, 1], [1, 1]]
    """
    numbers = torch.arange(start, 2**num_players if stop is None else stop)
    return (numbers[:, None] & (1 << torch.arange(num_players))) != 0


def semivalue_of_table(table: Tensor, weight: list[float]) -> Tensor:
    """Sum all marginal contributions with weights, from a table of all utilities.

    Args:
        table: ``[2^n, M]``, row b the utilities of coalition number b.
        weight: n numbers, the s-th for each coalition of size s that the player joins.

    Returns:
        ``[n, M]`` float64.
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
    """Compute the Shapley value's weights of single coalitions, 1 / (n binom(n-1, s)) for s = 0..n-1."""
    return [1 / (num_players * math.comb(num_players - 1, s)) for s in range(num_players)]


def per_coalition(size_weights: Sequence[float] | None, num_players: int) -> list[float]:
    """Convert weights of sizes to weights of single coalitions of size s = 0..n-1; None: the Shapley value's."""
    if size_weights is None:
        return shapley_weights(num_players)
    return [weight / math.comb(num_players - 1, s) for s, weight in enumerate(size_weights)]


def shapley_of_table(table: Tensor) -> Tensor:
    """Compute Shapley values ``[n, M]`` from a table ``[2^n, M]`` of all utilities, row b for coalition number b."""
    return semivalue_of_table(table, shapley_weights(len(table).bit_length() - 1))


def semivalue(utility: Utility, num_players: int, weight: list[float]) -> ShapleyEstimate:
    """Enumerate the game and compute its semivalue with the given weights; see :func:`semivalue_of_table`."""
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
    """Raise ConfigurationError if 2^n coalitions are too many to enumerate, or more than ``budget``."""
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
