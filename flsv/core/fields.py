"""When what metrics ask of a round is known, and coalitions that are trained beside it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, TypeVar, get_args

from torch import Tensor

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


@dataclass(frozen=True, eq=False)
class TrainedCoalitions:
    """Coalitions of clients, and the model that each has come to by the end of a round.

    Args:
        masks: bool ``[K, n]``, distinct; nobody and everybody are among them.
        build: ``build(i, out)`` writes the i-th coalition's model into ``out [P]``.
    """

    masks: Tensor
    build: Callable[[int, Tensor], None]

    def play(self, games: Any, metric: Any, masks: Tensor) -> Tensor:
        """The utilities ``[K']`` (or ``[K', M]``) of the models of some of these coalitions, bool ``[K', n]``."""
        places = {tuple(mask): place for place, mask in enumerate(self.masks.tolist())}
        asked = [places[tuple(mask)] for mask in masks.tolist()]
        return games.utility_of_models(lambda index, out: self.build(asked[index], out), len(asked), metric)
