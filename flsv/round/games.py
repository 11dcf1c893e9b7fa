"""What plays a round's coalition games, and models of coalitions that were trained beside the global one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor


class Games(Protocol):
    """A round's coalition games, see :class:`flsv.games.CoalitionGames`."""

    evaluator: Any
    server_lr: float

    def evaluator_of(self, metric: Any) -> Any: ...

    def utility(self, metric: Any = "accuracy", weighting: Any = "uniform") -> Any: ...

    def table_of(self, round: Any, metric: Any) -> Any: ...

    def utility_of_models(self, build: Callable[[int, Tensor], None], count: int, metric: Any) -> Tensor: ...

    def gradient_products(self, order: int = 1, loss: Any = "negative_loss") -> Any: ...

    def slopes(self, balanced: bool = False) -> Tensor: ...


@dataclass(frozen=True, eq=False)
class TrainedCoalitions:
    """Coalitions of clients, and the model that each has come to by the end of a round.

    Args:
        masks: bool ``[K, n]``, distinct; nobody and everybody are among them.
        build: ``build(i, out)`` writes the i-th coalition's model into ``out [P]``.
    """

    masks: Tensor
    build: Callable[[int, Tensor], None]

    def play(self, games: Games, metric: Any, masks: Tensor) -> Tensor:
        """The utilities ``[K']`` (or ``[K', M]``) of the models of some of these coalitions, bool ``[K', n]``."""
        places = {tuple(mask): place for place, mask in enumerate(self.masks.tolist())}
        asked = [places[tuple(mask)] for mask in masks.tolist()]
        return games.utility_of_models(lambda index, out: self.build(asked[index], out), len(asked), metric)
