"""Stages of a round, and the stage after which each attribute of a round is known."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, TypeVar, get_args

from torch import Tensor

Stage = Literal["training", "aggregation", "personalization", "exchange"]
#: The stages in their order. An attribute of a round without a mark is known after ``"training"``.
STAGES: tuple[Stage, ...] = get_args(Stage)

_KNOWN_AFTER: dict[str, Stage] = {}
F = TypeVar("F", bound=Callable[..., Any])


def after(stage: Stage) -> Callable[[F], F]:
    """Mark a property of :class:`Round` as known only after a stage. Put this decorator below ``@cached_property``.

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
    """Mark the fields ``names`` of :class:`Round` as known only after ``stage``."""
    _KNOWN_AFTER.update(dict.fromkeys(names, stage))


def stage_of(names: Iterable[Any]) -> Stage:
    """Return the latest stage after which the named attributes of a round are known. A metric that reads them is
    updated then.
    """
    stages = [_KNOWN_AFTER.get(name, "training") for name in names if isinstance(name, str)]
    return max(stages, key=STAGES.index, default="training")


def derived(cls: type) -> set[str]:
    """Name a class's cached properties."""
    return {name for name, value in vars(cls).items() if isinstance(value, cached_property)}


@dataclass(frozen=True, eq=False)
class TrainedCoalitions:
    """K coalitions of n clients, and the trained model of each.

    Args:
        masks: bool ``[K, n]``, one row per coalition, all different, the empty and the full one among them.
        build: ``build(i, out)`` writes the i-th coalition's model into the vector ``out``.
        weights: ``[n]``, the clients' weights in the federation's average, if they are known.
        before: a function from a performance measure to the scores of the module before training, if the empty and the
            full coalition are the only ones, else None. The full one is scored at the round's end.
    """

    masks: Tensor
    build: Callable[[int, Tensor], None]
    weights: Tensor | None = None
    before: Callable[[Any], Any] | None = None

    def builder(self, masks: Tensor) -> Callable[[int, Tensor], None]:
        """Return a function like :attr:`build` for J of these coalitions, ``masks``, bool ``[J, n]``."""
        places = {tuple(mask): place for place, mask in enumerate(self.masks.tolist())}
        rows = [places[tuple(mask)] for mask in masks.tolist()]
        return lambda index, out: self.build(rows[index], out)
