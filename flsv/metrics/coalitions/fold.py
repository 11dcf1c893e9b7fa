"""Fold: how the values of rounds become one value.

A fold declares states in the metric that it folds for, ``[n, M]`` each (M is 1 where values are not per class), adds a
round's estimate to them, reads the value and its standard error from them, and says what intervals are made of. The
states' reductions merge two stretches of rounds, the later one second.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from flsv.functional import ShapleyEstimate
from flsv.metrics.intervals import OverRounds


class Fold(ABC):
    """Base class: how a metric's rounds become one value.

    What is handed a ``metric`` is :class:`flsv.metrics.CoalitionValue`; ``k`` are the round's players.
    """

    over_rounds: ClassVar[OverRounds] = None
    """What intervals are made of, see :class:`flsv.metrics.intervals.WithIntervals`."""
    limits: ClassVar[tuple[float | None, float | None]] = (None, None)
    """The least and the largest value that there can be."""
    unit: ClassVar[str] = "{}"
    """Of the value, with the unit of a round's in its place."""
    sign: ClassVar[str] = "positive: the coalitions do better with the client; negative: worse; 0: no difference."
    """What more, less and 0 mean."""
    momentum: float = 0.0
    init: float | Literal["uniform"] | None = None

    def check(self, owner: str, per_class: bool) -> None:  # noqa: B027
        """Raise ConfigurationError where its arguments are out of range, or it is not for values per class."""

    @abstractmethod
    def init_states(self, metric: Any, num_clients: int, width: int) -> None:
        """Declare states."""

    def factor(self, round_index: int) -> float:
        """Of a round in the value; a round of 0 is not played."""
        return 1.0

    @abstractmethod
    def update(self, metric: Any, client_ids: Tensor, estimate: ShapleyEstimate, factor: float) -> Tensor:
        """Add a round; gives what it says of its clients ``[k, M]``, before the factor."""

    def skip(self, metric: Any) -> None:  # noqa: B027
        """A round that is not played."""

    @abstractmethod
    def compute(self, metric: Any) -> Tensor:
        """``[n, M]``, NaN for clients never seen."""

    def error(self, metric: Any) -> tuple[Tensor, Tensor] | None:
        """The value's standard error by the estimator ``[n, M]`` and its degrees of freedom, where they are known."""
        return None

    def diagnostics(self, metric: Any) -> dict[str, Tensor]:
        """What else there is to log, by name."""
        return {}

    def prior(self, num_clients: int | None) -> float | None:
        """What a client never seen is taken to be worth by those who read the metric."""
        if self.init == "uniform":
            return None if num_clients is None else 1 / num_clients
        return self.init


def freedom_of(estimate: ShapleyEstimate) -> Tensor:
    """Of the standard error's shape."""
    return torch.as_tensor(estimate.freedom, dtype=torch.float64).expand(estimate.stderr.shape)
