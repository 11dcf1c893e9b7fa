"""Fold: how the values of rounds become one value.

A fold adds its states to the metric, ``[n, M]`` for n clients and M classes (M is 1 if values are not per class), adds
each round's estimate to these states, computes the value and its standard error from them, and declares how intervals
are computed. The states' reductions merge the states of two parts of a run, the later part second.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from flsv.functional import ShapleyEstimate
from flsv.metrics.intervals import OverRounds


class Fold(ABC):
    """Base class of folds, which combine a client's values of single rounds to one value.

    A fold stores its states in the ``metric``, a :class:`flsv.metrics.CoalitionValue`, which calls :meth:`update` after
    each round. The shapes have n clients, k of them players of the round, and M columns (classes, or 1).
    """

    over_rounds: ClassVar[OverRounds] = None
    """How rounds are combined, for the intervals, see :class:`flsv.metrics.intervals.WithIntervals`."""
    limits: ClassVar[tuple[float | None, float | None]] = (None, None)
    """The least and the largest possible value."""
    unit: ClassVar[str] = "{}"
    """Unit of the value; the placeholder ``{}`` stands for the unit of a round's value."""
    sign: ClassVar[str] = "positive: the coalitions do better with the client; negative: worse; 0: no difference."
    """Meaning of positive, negative and zero values."""
    momentum: float = 0.0
    init: float | Literal["uniform"] | None = None

    def check(self, owner: str, per_class: bool) -> None:  # noqa: B027
        """Raise ConfigurationError if an argument is out of range or the fold cannot combine values per class;
        ``owner`` is the metric's name, for messages.
        """

    @abstractmethod
    def init_states(self, metric: Any, num_clients: int, width: int) -> None:
        """Declare the fold's states in the metric, with ``width`` columns (the number of classes, or 1)."""

    def factor(self, round_index: int) -> float:
        """Return the factor by which a round's values are multiplied; if it is 0, the round's game is not evaluated."""
        return 1.0

    @abstractmethod
    def update(self, metric: Any, client_ids: Tensor, estimate: ShapleyEstimate, factor: float) -> Tensor:
        """Add a round's estimate, multiplied by ``factor``, to the states, and return the round's values ``[k, M]``
        without this factor.
        """

    def skip(self, metric: Any) -> None:  # noqa: B027
        """Count a round whose game is not evaluated."""

    @abstractmethod
    def compute(self, metric: Any) -> Tensor:
        """Compute the values ``[n, M]``, NaN for clients that never took part."""

    def error(self, metric: Any) -> tuple[Tensor, Tensor] | None:
        """Return the values' standard error ``[n, M]`` due to the estimator's sampling, and its degrees of freedom; or
        None if they are not known.
        """
        return None

    def diagnostics(self, metric: Any) -> dict[str, Tensor]:
        """Return further values to log, ``{name: value}``."""
        return {}

    def prior(self, num_clients: int | None) -> float | None:
        """Return the value that samplers and aggregators assume for a client that never took part, by default ``init``.

        Args:
            num_clients: n; with ``init="uniform"`` the value is 1 / n. None if it is not known yet.

        Returns:
            The value, or None if there is none: samplers and aggregators then get NaN for the client.
        """
        if self.init == "uniform":
            return None if num_clients is None else 1 / num_clients
        return self.init


def freedom_of(estimate: ShapleyEstimate) -> Tensor:
    """Return the degrees of freedom of an estimate, broadcast to the shape of its ``stderr``."""
    return torch.as_tensor(estimate.freedom, dtype=torch.float64).expand(estimate.stderr.shape)
