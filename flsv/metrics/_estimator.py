"""Whether an estimator of Shapley values takes the arguments that a metric is given for it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from flsv import counting
from flsv.arguments import check_number
from flsv.errors import ConfigurationError
from flsv.functional.shapley import ESTIMATORS

#: What a metric passes itself.
GIVEN = ("utility", "num_players", "generator")


def check_estimator(owner: Any, estimator: str | Callable[..., Any], arguments: Mapping[str, Any]) -> None:
    """Raise unless there is such an estimator and it takes these arguments.

    Args:
        owner: the metric, for the message.
        estimator: a name in ``ESTIMATORS``, ``"auto"`` (whose arguments are the surrogate's), or a function.
        arguments: keywords for it.

    Raises:
        ConfigurationError: an unknown name; an argument that the estimator does not have, or that is out of range for
            any number of players.

    Example:
        >>> check_estimator("FedSV", "exact", {"bugdet": 8})
        Traceback (most recent call last):
        ...
        flsv.errors.ConfigurationError: FedSV(estimator_args={'bugdet': 8}): exact_shapley does not take ['bugdet']. \
It takes ['budget', 'target_stderr'].
    """
    who = owner if isinstance(owner, str) else type(owner).__name__
    if not callable(estimator) and estimator not in ("auto", *ESTIMATORS):
        raise ConfigurationError(
            f"{who}(estimator={estimator!r}): expected a function or one of {['auto', *ESTIMATORS]}."
        )
    function = estimator if callable(estimator) else ESTIMATORS["surrogate" if estimator == "auto" else estimator]
    try:
        parameters = inspect.signature(function).parameters
    except ValueError:  # a function that does not say what it takes
        return
    known = sorted(parameters.keys() - set(GIVEN))
    unknown = sorted(set(arguments) - set(known))
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        unknown = sorted(set(arguments) & set(GIVEN))
    if unknown:
        name = getattr(function, "__name__", type(function).__name__)
        raise ConfigurationError(
            f"{who}(estimator_args={dict(arguments)}): {name} does not take {unknown}. It takes {known}."
        )
    for name, value in arguments.items():
        if isinstance(value, float):
            check_number(who, f"estimator_args.{name}", value)
    if arguments and not callable(estimator):
        # What is out of range is so for any number of players, and one is played at once.
        try:
            with counting.unheard():
                function(_one_player, 1, generator=torch.Generator(), **arguments)
        except (ConfigurationError, TypeError) as error:
            raise ConfigurationError(f"{who}(estimator_args={dict(arguments)}): {error}") from error


def _one_player(masks: Tensor) -> Tensor:
    return masks.sum(1).double()
