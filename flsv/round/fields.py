"""When what metrics ask of a round is known."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cached_property
from typing import Any, Literal, TypeVar, get_args

Stage = Literal["training", "aggregation", "personalization", "exchange"]
#: In their order; ``"training"``, before aggregation, goes without saying.
STAGES: tuple[Stage, ...] = get_args(Stage)

_KNOWN_AFTER: dict[str, Stage] = {}
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


def derived(cls: type) -> set[str]:
    """Names of what a class derives when it is first asked for."""
    return {name for name, value in vars(cls).items() if isinstance(value, cached_property)}
