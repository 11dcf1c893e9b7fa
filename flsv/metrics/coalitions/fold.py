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
    """Base class of folds, which combine a metric's rounds to one value.

    The methods' argument ``metric`` is a :class:`flsv.metrics.CoalitionValue`; k is the number of the round's players.
    """

    over_rounds: ClassVar[OverRounds] = None
    """How intervals are computed, see :class:`flsv.metrics.intervals.WithIntervals`."""
    limits: ClassVar[tuple[float | None, float | None]] = (None, None)
    """The least and the largest possible value."""
    unit: ClassVar[str] = "{}"
    """Unit of the value; the placeholder is the unit of a round's."""
    sign: ClassVar[str] = "positive: the coalitions do better with the client; negative: worse; 0: no difference."
    """Meaning of positive, negative and zero values."""
    momentum: float = 0.0
    init: float | Literal["uniform"] | None = None

    def check(self, owner: str, per_class: bool) -> None:  # noqa: B027
        """Raise ConfigurationError where an argument is out of range, or the fold is not for values per class."""

    @abstractmethod
    def init_states(self, metric: Any, num_clients: int, width: int) -> None:
        """Declare the states."""

    def factor(self, round_index: int) -> float:
        """Return a round's factor in the value; a round of factor 0 is not played."""
        return 1.0

    @abstractmethod
    def update(self, metric: Any, client_ids: Tensor, estimate: ShapleyEstimate, factor: float) -> Tensor:
        """Add a round, and return its clients' values ``[k, M]`` before the factor."""

    def skip(self, metric: Any) -> None:  # noqa: B027
        """Count a round that is not played."""

    @abstractmethod
    def compute(self, metric: Any) -> Tensor:
        """Compute the values ``[n, M]``, NaN for clients never seen."""

    def error(self, metric: Any) -> tuple[Tensor, Tensor] | None:
        """Return the standard error by the estimator ``[n, M]`` and its degrees of freedom; None where they are not
        known.
        """
        return None

    def diagnostics(self, metric: Any) -> dict[str, Tensor]:
        """Return further values to log, by name."""
        return {}

    def prior(self, num_clients: int | None) -> float | None:
        """Return the value that readers of the metric assume for a client never seen."""
        if self.init == "uniform":
            return None if num_clients is None else 1 / num_clients
        return self.init


def freedom_of(estimate: ShapleyEstimate) -> Tensor:
    """Return the degrees of freedom, broadcast to ``stderr``."""
    return torch.as_tensor(estimate.freedom, dtype=torch.float64).expand(estimate.stderr.shape)
