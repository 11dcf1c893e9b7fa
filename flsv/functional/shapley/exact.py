"""Values from all 2^n coalitions, and leave-one-out values from n + 1 of them."""

from __future__ import annotations

import math
from collections.abc import Iterator

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
from flsv.utilities.declared import checked
from flsv.utilities.errors import ConfigurationError

#: Masks per call of the utility: a few MB, and enough to outweigh the overhead of a call.
_COALITIONS_PER_CHUNK = 2**16


def all_coalitions(
    num_players: int,
    begin: int = 0,
    end: int | None = None,
) -> Tensor:
    """List the coalitions ``begin`` to ``end - 1`` as masks, bool ``[end - begin, n]``. Bit i of a coalition's number
    is set if player i is a member.
    """
    if end is None:
        end = 2**num_players
    numbers = torch.arange(begin, end)
    bits = 1 << torch.arange(num_players)
    return (numbers[:, None] & bits) != 0


def coalition_chunks(num_players: int, chunk_size: int) -> Iterator[Tensor]:
    """Yield the masks of all 2^n coalitions in order, at most ``chunk_size`` at once."""
    num_coalitions = 2**num_players
    for begin in range(0, num_coalitions, chunk_size):
        yield all_coalitions(num_players, begin, min(begin + chunk_size, num_coalitions))


def weights_by_size(num_players: int) -> Tensor:
    """Return the weights of marginal contributions to 0, 1, ..., n - 1 other players, float64 ``[n]``."""
    counts = [math.comb(num_players - 1, size) for size in range(num_players)]
    weights = [1 / (num_players * count) for count in counts]
    return torch.tensor(weights, dtype=torch.float64)


def shapley_of_table(table: Tensor) -> Tensor:
    """Compute Shapley values ``[n, M]`` from all utilities ``[2^n, M]``, in the order of :func:`all_coalitions`."""
    # The coalitions without player i, in order, are the numbers 0 to 2^(n-1) - 1 with a bit 0 inserted at position i.
    # So their sizes, the numbers of one-bits, are the same for every player i, and so are their weights.
    num_players = len(table).bit_length() - 1
    num_games = table.shape[1]
    sizes = torch.zeros(1, dtype=torch.int64)
    for _ in range(num_players - 1):
        sizes = torch.cat([sizes, sizes + 1])
    weights = weights_by_size(num_players)[sizes]  # [2^(n-1)]

    # Viewed as [high bits, bit i, low bits, M], U(S) and U(S + i) are side by side, so that a player that changes no
    # utility has the value 0 exactly.
    values = torch.empty(num_players, num_games, dtype=torch.float64)
    for player in range(num_players):
        utilities = table.view(-1, 2, 2**player, num_games)
        marginals = utilities[:, 1] - utilities[:, 0]
        values[player] = weights @ marginals.reshape(len(weights), num_games)
    return values


def check_enumerable(
    name: str,
    num_players: int,
    budget: int | None = None,
    *,
    alternatives: str,
) -> None:
    """Raise ConfigurationError above 22 players, or if the budget does not suffice for all coalitions."""
    check_num_players(num_players)
    if num_players > MAX_EXACT_PLAYERS:
        raise ConfigurationError(
            f"{name} with {num_players} players needs 2^{num_players} = {2**num_players:,} evaluations, but the limit "
            f"is {MAX_EXACT_PLAYERS} players. {alternatives}"
        )
    if budget is not None and budget < 2**num_players:
        raise ConfigurationError(
            f"{name}: budget={budget} is below the minimum of 2^{num_players} = {2**num_players} evaluations for "
            f"{num_players} players. {alternatives}"
        )


@checked
def exact_shapley(
    utility: Utility,
    num_players: int,
    *,
    budget: int | None = None,
    generator: Generator | None = None,
) -> ShapleyEstimate:
    """Compute the Shapley value from all 2^n coalitions (ShapleyFL eq. 1, definition 4.1).

        SV_i = 1/n sum_{S not containing i} [U(S + i) - U(S)] / binom(n - 1, |S|)

    is the value of player i in the game U. The second line of the paper's definition 4.1 divides by
    ``|C| binom(|C|, |S|)``, a misprint: these weights do not sum to 1. The first line divides by
    ``|C| binom(|C| - 1, |S|)`` and is the Shapley value.

    Args:
        utility: the game, from masks bool ``[K, n]`` to utilities ``[K]``, or ``[K, M]`` for M games at once. It is
            called with up to 65,536 coalitions at once.
        num_players: the number n of players, at most 22.
        budget: largest number of evaluations, at least 2^n. None: no limit.
        generator: not used. All estimators have this argument.

    Returns:
        The estimate: ``values``, ``[n]`` or ``[n, M]``, ``stderr`` 0, and 2^n ``evaluations``.

    Raises:
        ConfigurationError: there are more than 22 players or none, or the budget is below 2^n.
        ValueError: a utility is NaN or infinite, or ``utility`` returns a wrong shape.

    Example:
        The glove game: player 0 owns a left glove, players 1 and 2 a right one. A pair is worth 1.

        >>> glove = lambda masks: (masks[:, 0] & (masks[:, 1] | masks[:, 2])).float()
        >>> exact_shapley(glove, 3).values
        tensor([0.6667, 0.1667, 0.1667])
    """
    alternatives = "Use surrogate_shapley or permutation_shapley with a budget."
    check_enumerable("exact_shapley", num_players, budget, alternatives=alternatives)
    chunks = coalition_chunks(num_players, _COALITIONS_PER_CHUNK)
    utilities = torch.cat([evaluate(utility, masks) for masks in chunks])
    table = utilities.reshape(len(utilities), -1)  # [2^n, M]
    values = shapley_of_table(table.to("cpu", torch.float64))
    values = values.to(result_dtype(utilities))
    if utilities.ndim == 1:
        values = values[:, 0]
    return ShapleyEstimate(values, torch.zeros_like(values), len(utilities))


def leave_one_out(
    utility: Utility,
    num_players: int,
    *,
    budget: int | None = None,
    generator: Generator | None = None,
) -> ShapleyEstimate:
    r"""Compute the leave-one-out values U(N) - U(N \ {i}).

    Args:
        utility: the game, from masks bool ``[K, n]`` to utilities ``[K]``, or ``[K, M]`` for M games at once.
        num_players: the number n of players.
        budget: largest number of distinct evaluations, at least n + 1. None: n + 1.
        generator: not used. All estimators have this argument.

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
    game = Sampling("leave_one_out", utility, num_players, budget, minimum=num_players + 1)
    grand_coalition = torch.ones(1, num_players, dtype=torch.bool)
    all_but_one = ~torch.eye(num_players, dtype=torch.bool)
    utilities = game(torch.cat([grand_coalition, all_but_one]))
    values = utilities[0] - utilities[1:]
    return game.estimate(values, torch.zeros_like(values))
