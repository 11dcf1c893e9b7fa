"""The exact Shapley value, from all 2^n coalitions."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Generator

from flsv.functional.shapley.enumeration import check_enumerable, per_coalition, semivalue
from flsv.functional.shapley.game import ShapleyEstimate, Utility


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
