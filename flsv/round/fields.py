"""When what metrics ask of a round is known, and whether it is known where a server sees sums over clients only."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cached_property
from typing import Any, Literal, TypeVar, get_args

Stage = Literal["training", "aggregation", "personalization", "exchange"]
#: In their order; ``"training"``, before aggregation, goes without saying.
STAGES: tuple[Stage, ...] = get_args(Stage)

_KNOWN_AFTER: dict[str, Stage] = {}
_OF_SUMS: set[Any] = set()
#: What a server that sees sums only knows of a round all the same.
FROM_SUMS = {
    "round_index",
    "client_ids",
    "senders",
    "reached",
    "clients",
    "inclusion_probabilities",
    "generator",
    "global_vector",
    "server_vector",
    "server_update",
    "server_data",
    "coalitions",
    "aggregation_weights",
    "sum_weight",
    "uploaded",
    "downloaded",
    "uploaded_bytes",
    "downloaded_bytes",
}
F = TypeVar("F", bound=Callable[..., Any])


def after(stage: Stage) -> Callable[[F], F]:
    """Mark a property that a round has only after a stage. Put it below ``@cached_property``.

    Example:
        >>> @after("aggregation")
        ... def server_norm(round): ...
        >>> stage_of(["client_ids", "server_norm"])
        'aggregation'
    """

    def mark(function: F) -> F:
        _KNOWN_AFTER[function.__name__] = stage
        return function

    return mark


def known_after(names: Iterable[str], stage: Stage) -> None:
    """The same for plain fields."""
    _KNOWN_AFTER.update(dict.fromkeys(names, stage))


def stage_of(names: Iterable[Any]) -> Stage:
    """When a metric that asks for these is updated: when the last of them is known."""
    stages = [_KNOWN_AFTER.get(name, "training") for name in names if isinstance(name, str)]
    return max(stages, key=STAGES.index, default="training")


def of_sums(function: F) -> F:
    """Mark a function of a round that needs nothing but sums over clients, so that it can be had where a server sees
    no client's update by itself. Put it above the function that is a metric's ``round_fields``.

    Example:
        >>> @of_sums
        ... def model_norm(round): ...
        >>> needs_sums_only(model_norm), needs_sums_only("server_vector"), needs_sums_only("client_vectors")
        (True, True, False)
    """
    _OF_SUMS.add(function)
    return function


def needs_sums_only(field: Any) -> bool:
    """Whether a metric can be given this where the server sees sums only: a name of :class:`Round`, or a function."""
    if isinstance(field, str):
        return field in FROM_SUMS
    return getattr(field, "func", getattr(field, "__func__", field)) in _OF_SUMS


def derived(cls: type) -> set[str]:
    """Names of what a class derives when it is first asked for."""
    return {name for name, value in vars(cls).items() if isinstance(value, cached_property)}
