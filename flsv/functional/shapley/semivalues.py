"""Semivalues of a coalition game by name (Shapley, Banzhaf, Beta, leave-one-out), and their estimators.

Dubey, Neyman and Weber, "Value Theory Without Efficiency", Mathematics of Operations Research 6, 1981: semivalues are
means of a player's marginal contributions U(S + i) - U(S) that differ in the weights of the sizes of S. With weights
q_0, ..., q_{n-1} that sum to 1,

    phi_i = sum_{s=0..n-1} q_s E[U(S + i) - U(S)],  S uniform among those of size s without i,

where q_s is 1/n for Shapley, binom(n - 1, s) / 2^(n - 1) for Banzhaf, from a Beta distribution for Beta, and 1 at
s = n - 1 for leave-one-out. ``exact`` and ``permutation`` estimate any of them, each other estimator a single one.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from flsv.functional.shapley.banzhaf import banzhaf
from flsv.functional.shapley.beta import beta_shapley, beta_weights
from flsv.functional.shapley.complementary import complementary_shapley
from flsv.functional.shapley.difference import difference_shapley
from flsv.functional.shapley.exact import exact_shapley
from flsv.functional.shapley.game import ShapleyEstimate
from flsv.functional.shapley.gtg import gtg_shapley
from flsv.functional.shapley.leave_one_out import leave_one_out
from flsv.functional.shapley.permutation import permutation_shapley
from flsv.functional.shapley.regression import regression_shapley
from flsv.functional.shapley.stratified import stratified_shapley
from flsv.functional.shapley.surrogate import surrogate_shapley
from flsv.utilities import progress
from flsv.utilities.arguments import check_number
from flsv.utilities.errors import ConfigurationError

Estimator = Callable[..., ShapleyEstimate]
Semivalue = Literal["shapley", "banzhaf", "beta", "leave_one_out"]

ESTIMATORS: dict[str, Estimator] = {
    "exact": exact_shapley,
    "permutation": permutation_shapley,
    "stratified": stratified_shapley,
    "complementary": complementary_shapley,
    "difference": difference_shapley,
    "regression": regression_shapley,
    "surrogate": surrogate_shapley,
    "gtg": gtg_shapley,
    "leave_one_out": leave_one_out,
    "banzhaf": banzhaf,
    "beta": beta_shapley,
}
"""Estimators by name; all accept ``budget``, ``generator`` and ``target_stderr``."""

#: Estimators of any semivalue, by the weights of the coalitions' sizes.
OF_ANY_VALUE = ("exact", "permutation")
#: Arguments that a metric passes itself.
GIVEN = ("utility", "num_players", "generator", "size_weights")
_FEW = 10  # up to so many players all coalitions are evaluated
_PER_PLAYER = 20  # evaluations per player, for more players


def size_weights(value: Semivalue, num_players: int, **of_beta: float) -> list[float]:
    """Compute the total weight of the coalitions of size s = 0..n-1 that a player joins; they sum to 1.

    Args:
        value: which semivalue.
        num_players: the number n of players.
        of_beta: ``alpha`` and ``beta`` of the Beta value.

    Example:
        >>> size_weights("banzhaf", 4), size_weights("leave_one_out", 4)
        ([0.125, 0.375, 0.375, 0.125], [0.0, 0.0, 0.0, 1.0])
    """
    n = num_players
    if value == "shapley":
        return [1 / n] * n
    if value == "banzhaf":
        return [math.comb(n - 1, s) / 2 ** (n - 1) for s in range(n)]
    return beta_weights(n, **{"alpha": 16.0, "beta": 1.0, **of_beta}) if value == "beta" else [0.0] * (n - 1) + [1.0]


def estimator_of(
    value: Semivalue, estimator: str | Estimator, num_players: int, arguments: Mapping[str, Any]
) -> Estimator:
    """Choose the estimator of a value and bind its arguments.

    The result is called with a utility, the number of players and a generator.

    Args:
        value: which semivalue.
        estimator: a name in ``ESTIMATORS``, a function of the same signature, or ``"auto"``: ``"surrogate"`` for the
            Shapley value, for the others the estimator with the value's name. Unless ``arguments`` have another budget,
            it buys the exact value for up to 10 players, and 20 evaluations per player for more.
        num_players: the number n of players.
        arguments: keywords for the estimator, with ``alpha`` and ``beta`` of the Beta value.

    Returns:
        ``f(utility, num_players, *, generator)``.

    Example:
        >>> majority = lambda masks: (masks.sum(dim=1) >= 2).float()
        >>> estimator_of("banzhaf", "auto", 3, {})(majority, 3).values
        tensor([0.5000, 0.5000, 0.5000])
    """
    if callable(estimator):
        return partial(estimator, **arguments)
    few = num_players <= _FEW
    usual = {"budget": 2**num_players if few else _PER_PLAYER * num_players}
    if value == "shapley":
        if estimator != "auto":
            return partial(ESTIMATORS[estimator], **arguments)
        # The surrogate is exact, too, if the budget buys all coalitions.
        return partial(surrogate_shapley, **{**usual, **arguments}) if arguments or not few else exact_shapley
    if estimator in OF_ANY_VALUE:
        of_beta = {name: arguments[name] for name in ("alpha", "beta") if name in arguments}
        others = {name: given for name, given in arguments.items() if name not in of_beta}
        return partial(ESTIMATORS[estimator], size_weights=size_weights(value, num_players, **of_beta), **others)
    if value == "leave_one_out":
        return partial(leave_one_out, **arguments)
    return partial(ESTIMATORS[value], **{**usual, **arguments})


def check_estimator(
    owner: str, estimator: str | Estimator, arguments: Mapping[str, Any], value: Semivalue = "shapley"
) -> None:
    """Raise unless the value has such an estimator, and the estimator takes these arguments.

    Args:
        owner: the class that has these arguments, for the message.
        estimator: as for :func:`estimator_of`; ``"auto"`` takes the arguments of the estimator that it stands for.
        arguments: keywords for the estimator.
        value: which semivalue.

    Raises:
        ConfigurationError: an unknown value or estimator, or an estimator of another value; an argument that the
            estimator does not have, or that is out of range for any number of players.

    Example:
        >>> check_estimator("FedSV", "exact", {"bugdet": 8})
        Traceback (most recent call last):
        ...
        flsv.utilities.errors.ConfigurationError: FedSV(estimator_args={'bugdet': 8}): exact_shapley does not take \
['bugdet']. It takes ['budget', 'target_stderr'].
    """
    names = ["auto", *(ESTIMATORS if value == "shapley" else OF_ANY_VALUE)]
    if not callable(estimator) and estimator not in names:
        of = "" if value == "shapley" else f", which give the value {value!r}"
        raise ConfigurationError(f"{owner}(estimator={estimator!r}): expected a function or one of {names}{of}.")
    own = "surrogate" if value == "shapley" else value
    named = own if estimator == "auto" else estimator
    _check_names(owner, ESTIMATORS[named] if isinstance(named, str) else named, arguments, value)
    for name, given in arguments.items():
        if isinstance(given, float):
            check_number(owner, f"estimator_args.{name}", given)
    if arguments and isinstance(named, str):
        # Arguments out of range are so for any number of players, and a game of one takes no time. By name: "auto" is
        # exact for one player and would not look at the arguments.
        try:
            with progress.muted():
                played = named if value == "shapley" else estimator
                estimator_of(value, played, 1, arguments)(_one_player, 1, generator=torch.Generator())
        except (ConfigurationError, TypeError) as error:
            raise ConfigurationError(f"{owner}(estimator_args={dict(arguments)}): {error}") from error


def _check_names(owner: str, function: Estimator, arguments: Mapping[str, Any], value: Semivalue) -> None:
    """Raise if the estimator does not have one of these arguments."""
    try:
        parameters = inspect.signature(function).parameters
    except ValueError:  # a function without a signature
        return
    of_value = {"alpha", "beta"} if value == "beta" and function in ESTIMATORS.values() else set()
    known = sorted((parameters.keys() | of_value) - set(GIVEN))
    unknown = sorted(set(arguments) - set(known))
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        unknown = sorted(set(arguments) & set(GIVEN))
    if unknown:
        name = getattr(function, "__name__", type(function).__name__)
        raise ConfigurationError(
            f"{owner}(estimator_args={dict(arguments)}): {name} does not take {unknown}. It takes {known}."
        )


def _one_player(masks: Tensor) -> Tensor:
    """Play a game of one player, whose value is 1."""
    return masks.sum(1).double()
