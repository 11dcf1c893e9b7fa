"""Leave-one-out: the decrease of the grand coalition's utility if one player is left out.

It is the cheapest contribution measure (n + 1 evaluations for n players), and a baseline in nearly every paper. It
differs from the Shapley value: for example, two players with the same data both get 0.
"""

from __future__ import annotations

import torch
from torch import Generator

from flsv.functional.shapley.budget import Sampling
from flsv.functional.shapley.game import ShapleyEstimate, Utility


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
