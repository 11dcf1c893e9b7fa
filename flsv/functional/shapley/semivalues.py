"""Semivalues of a coalition game by name, and the estimators of each.

Semivalues are weighted means of the marginal contributions U(S + i) - U(S) of a player i to coalitions S (Dubey, Neyman
and Weber, "Value Theory Without Efficiency", Mathematics of Operations Research 6, 1981). With n players and weights
q_0, ..., q_{n-1} that sum to 1, the value of player i is

    phi_i = sum_{s=0..n-1} q_s E[U(S + i) - U(S)],  S uniform among the coalitions of size s without i.

The weight q_s is 1/n for Shapley and binom(n - 1, s) / 2^(n - 1) for Banzhaf. For leave-one-out it is 1 at s = n - 1
and otherwise 0.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal

import torch
from torch import Generator, Tensor

from flsv.functional.shapley.difference import difference_shapley
from flsv.functional.shapley.exact import exact_shapley, leave_one_out
from flsv.functional.shapley.game import ShapleyEstimate, Utility, check_num_players
from flsv.functional.shapley.permutation import gtg_shapley, permutation_shapley
from flsv.functional.shapley.stratified import complementary_shapley, stratified_shapley
from flsv.functional.shapley.surrogate import surrogate_shapley
from flsv.utilities.declared import check_argument
from flsv.utilities.errors import ConfigurationError


def banzhaf(
    utility: Utility,
    num_players: int,
    *,
    budget: int | None = None,
    generator: Generator | None = None,
) -> ShapleyEstimate:
    """Compute the Banzhaf value, exactly or by stratified sampling.

        BV_i = 2^-(n-1) sum_{S not containing i} [U(S + i) - U(S)]

    All coalitions have the same weight, which makes it the semivalue most robust to noise in the utility (Banzhaf 1965;
    Wang and Jia, "Data Banzhaf", AISTATS 2023). It does not satisfy efficiency. Departure: the paper estimates it from
    uniform coalitions of all sizes, here :func:`stratified_shapley` does, with the Banzhaf value's weights.

    Args:
        utility: the game, from masks bool ``[K, n]`` to utilities ``[K]``, or ``[K, M]`` for M games at once.
        num_players: the number n of players, at most 22 without a budget.
        budget: largest number of distinct evaluations, as for :func:`stratified_shapley`. None: 2^n.
        generator: the random generator that draws the coalitions. None: torch's default.

    Returns:
        The estimate: ``values`` and ``stderr``, ``[n]`` or ``[n, M]``. ``stderr`` is 0 for exact values.

    Raises:
        ConfigurationError: the budget is below the minimum, there are more than 22 players and no budget, or no player.
        ValueError: a utility is NaN or infinite, or ``utility`` returns a wrong shape.

    Example:
        >>> majority = lambda masks: (masks.sum(dim=1) >= 2).float()
        >>> banzhaf(majority, 3).values
        tensor([0.5000, 0.5000, 0.5000])
    """
    check_num_players(num_players)
    weights = size_weights("banzhaf", num_players)
    if budget is None:
        return exact_shapley(utility, num_players, size_weights=weights)
    return stratified_shapley(utility, num_players, size_weights=weights, budget=budget, generator=generator)


Estimator = Callable[..., ShapleyEstimate]
Semivalue = Literal["shapley", "banzhaf", "leave_one_out"]

ESTIMATORS: dict[str, Estimator] = {
    "exact": exact_shapley,
    "permutation": permutation_shapley,
    "stratified": stratified_shapley,
    "complementary": complementary_shapley,
    "difference": difference_shapley,
    "surrogate": surrogate_shapley,
    "gtg": gtg_shapley,
    "leave_one_out": leave_one_out,
    "banzhaf": banzhaf,
}
"""Estimators by name. All accept ``budget`` and ``generator``."""

#: The estimators that can estimate any semivalue; they have the argument ``size_weights``.
OF_ANY_VALUE = ("exact", "permutation", "stratified")
#: Arguments of estimators that metrics pass, and that ``estimator_args`` cannot contain.
GIVEN = ("utility", "num_players", "generator", "size_weights")
_FEW = 10  # the largest number of players for which "auto" evaluates all coalitions
_PER_PLAYER = 20  # evaluations per player that "auto" takes for more players


def size_weights(value: Semivalue, num_players: int) -> list[float]:
    """Return a semivalue's n weights of coalition sizes, which sum to 1."""
    n = num_players
    if value == "shapley":
        return [1 / n] * n
    if value == "banzhaf":
        return [math.comb(n - 1, s) / 2 ** (n - 1) for s in range(n)]
    return [0.0] * (n - 1) + [1.0]


def estimator_of(
    value: Semivalue, estimator: str | Estimator, num_players: int, arguments: Mapping[str, Any]
) -> Estimator:
    """Choose the estimator of a semivalue, and bind its arguments: ``f(utility, num_players, *, generator)``."""
    if callable(estimator):
        return partial(estimator, **arguments)
    few = num_players <= _FEW
    usual = {"budget": 2**num_players if few else _PER_PLAYER * num_players}
    if value == "shapley":
        if estimator != "auto":
            return partial(ESTIMATORS[estimator], **arguments)
        # The surrogate is exact, too, if the budget suffices for all coalitions.
        return partial(surrogate_shapley, **{**usual, **arguments}) if arguments or not few else exact_shapley
    if estimator in OF_ANY_VALUE:
        return partial(ESTIMATORS[estimator], size_weights=size_weights(value, num_players), **arguments)
    if value == "leave_one_out":
        return partial(leave_one_out, **arguments)
    return partial(banzhaf, **{**usual, **arguments})


def check_estimator(
    owner: str, estimator: str | Estimator, arguments: Mapping[str, Any], value: Semivalue = "shapley"
) -> None:
    """Raise ConfigurationError unless an estimator exists, estimates this semivalue, and takes the arguments."""
    check_argument(owner, "value", value, Semivalue)
    names = ["auto", *(ESTIMATORS if value == "shapley" else OF_ANY_VALUE)]
    if not callable(estimator) and estimator not in names:
        of = "" if value == "shapley" else f", which give the value {value!r}"
        raise ConfigurationError(f"{owner}(estimator={estimator!r}): expected a function or one of {names}{of}.")
    own = "surrogate" if value == "shapley" else value
    named = own if estimator == "auto" else estimator
    _check_names(owner, ESTIMATORS[named] if isinstance(named, str) else named, arguments)
    for name, given in arguments.items():
        if isinstance(given, float):
            check_argument(owner, f"estimator_args.{name}", given, float)
    if arguments and isinstance(named, str):
        # An argument that is out of range is so with any number of players, and a game of one player takes no time. The
        # estimator is named, since "auto" is the exact one for a single player and would not read the arguments.
        try:
            played = named if value == "shapley" else estimator
            estimator_of(value, played, 1, arguments)(_one_player, 1, generator=torch.Generator())
        except (ConfigurationError, TypeError) as error:
            raise ConfigurationError(f"{owner}(estimator_args={dict(arguments)}): {error}") from error


def _check_names(owner: str, function: Estimator, arguments: Mapping[str, Any]) -> None:
    """Raise ConfigurationError unless ``function`` takes all ``arguments``."""
    try:
        parameters = inspect.signature(function).parameters
    except ValueError:  # a function without a signature
        return
    known = sorted(parameters.keys() - set(GIVEN))
    unknown = sorted(set(arguments) - set(known))
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        unknown = sorted(set(arguments) & set(GIVEN))
    if unknown:
        name = getattr(function, "__name__", type(function).__name__)
        raise ConfigurationError(
            f"{owner}(estimator_args={dict(arguments)}): {name} does not take {unknown}. It takes {known}."
        )


def _one_player(masks: Tensor) -> Tensor:
    """Return the utilities of coalitions in a game of one player, who is worth 1."""
    return masks.sum(1).double()
