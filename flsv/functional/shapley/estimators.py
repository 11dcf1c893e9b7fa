"""Estimators of Shapley values by name, and the choice of one for a metric."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from flsv.functional.shapley.difference import difference_shapley
from flsv.functional.shapley.exact import exact_shapley, leave_one_out
from flsv.functional.shapley.game import ShapleyEstimate
from flsv.functional.shapley.permutation import gtg_shapley, permutation_shapley
from flsv.functional.shapley.surrogate import surrogate_shapley
from flsv.utilities.errors import ConfigurationError

Estimator = Callable[..., ShapleyEstimate]

ESTIMATORS: dict[str, Estimator] = {
    "exact": exact_shapley,
    "permutation": permutation_shapley,
    "difference": difference_shapley,
    "surrogate": surrogate_shapley,
    "gtg": gtg_shapley,
    "leave_one_out": leave_one_out,
}
"""Estimators by name. All accept ``budget`` and ``generator``."""

_MAX_ENUMERATED_PLAYERS = 10  # up to this number "auto" evaluates all coalitions
_BUDGET_PER_PLAYER = 20  # evaluations per player by "auto" for more players


def estimator_of(
    estimator: str | Estimator,
    num_players: int,
    arguments: Mapping[str, Any],
) -> Estimator:
    """Return an estimator with its arguments bound, ``f(utility, num_players, *, generator)``. ``"auto"`` chooses one
    by the number of players.
    """
    if callable(estimator):
        return partial(estimator, **arguments)
    if estimator != "auto":
        return partial(ESTIMATORS[estimator], **arguments)
    if num_players > _MAX_ENUMERATED_PLAYERS:
        default_budget = _BUDGET_PER_PLAYER * num_players
    elif arguments:
        default_budget = 2**num_players  # all coalitions: the surrogate's values are exact, too
    else:
        return exact_shapley
    return partial(surrogate_shapley, **{"budget": default_budget, **arguments})


def check_estimator(
    owner: str,
    estimator: str | Estimator,
    arguments: Mapping[str, Any],
) -> None:
    """Raise ConfigurationError unless an estimator exists and takes the arguments."""
    function = _function_of(owner, estimator)
    num_players = 1  # enough to find arguments that are out of range
    try:
        # A TypeError is raised for arguments that the function does not take.
        signature = inspect.signature(function)
        signature.bind(_additive_game, num_players, generator=None, **arguments)
        if arguments and function in ESTIMATORS.values():
            function(_additive_game, num_players, generator=torch.Generator(), **arguments)
    except (ConfigurationError, TypeError) as error:
        raise ConfigurationError(f"{owner}(estimator_args={dict(arguments)}): {error}") from error


def _additive_game(masks: torch.Tensor) -> torch.Tensor:
    return masks.sum(1).double()


def _function_of(owner: str, estimator: str | Estimator) -> Estimator:
    """Return the function that takes an estimator's arguments."""
    if callable(estimator):
        return estimator
    if estimator == "auto":
        return surrogate_shapley
    if estimator not in ESTIMATORS:
        names = ["auto", *ESTIMATORS]
        raise ConfigurationError(
            f"{owner}(estimator={estimator!r}): expected a function or one of {names}."
        )
    return ESTIMATORS[estimator]
