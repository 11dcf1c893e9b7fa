"""Fold: the rule by which a :class:`flsv.metrics.CoalitionValue` combines the values of its rounds to one value."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from flsv.functional import ShapleyEstimate
from flsv.metrics.intervals import OverRounds


class Fold(ABC):
    """Base class of folds, with which a :class:`flsv.metrics.CoalitionValue` combines the values of its rounds.

    The metric calls its fold, and passes itself as ``metric``. The fold stores nothing itself: it declares states in
    the metric, adds each round's estimate to them, and computes the value and its standard error from them. The states'
    reductions must merge the states of two parts of a run, the later part second.

    Shapes: n is the number of clients, k that of the round's players, and M that of classes, or 1 if values are not per
    class.
    """

    over_rounds: ClassVar[OverRounds] = None
    """How rounds are combined, for the intervals, see :attr:`flsv.metrics.intervals.WithIntervals.over_rounds`."""
    limits: ClassVar[tuple[float | None, float | None]] = (None, None)
    """The least and the largest possible value; None: there is no limit."""
    unit: ClassVar[str] = "{}"
    """Unit of the value; the placeholder ``{}`` stands for the unit of a round's value."""
    sign: ClassVar[str] = "positive: the coalitions do better with the client; negative: worse; 0: no difference."
    """Meaning of positive, negative and zero values."""
    momentum: float = 0.0
    init: float | Literal["uniform"] | None = None

    def check(self, owner: str, per_class: bool) -> None:  # noqa: B027
        """Raise ConfigurationError if values are per class and the fold cannot combine these; ``owner`` is the metric's
        name, for the message.
        """

    @abstractmethod
    def init_states(self, metric: Any, num_clients: int, width: int) -> None:
        """Declare the fold's states with ``metric.add_state``: n = ``num_clients`` rows and M = ``width`` columns."""

    def factor(self, round_index: int) -> float:
        """Return the weight of a round's values; if it is 0, the round's game is not evaluated."""
        return 1.0

    @abstractmethod
    def update(self, metric: Any, client_ids: Tensor, estimate: ShapleyEstimate, factor: float) -> Tensor:
        """Add a round's values to the metric's states.

        Args:
            metric: the metric with the states.
            client_ids: ``[k]``, the ids of the round's players.
            estimate: the players' values in the round's game.
            factor: the weight of this round, from :meth:`factor`.

        Returns:
            ``[k, M]``, the values that the round contributes (for example normalized), without the weight.
        """

    def skip(self, metric: Any) -> None:  # noqa: B027
        """Count a round whose game is not evaluated, since its :meth:`factor` is 0; by default do nothing."""

    @abstractmethod
    def compute(self, metric: Any) -> Tensor:
        """Compute the values ``[n, M]`` from the metric's states; NaN for clients that never took part."""

    def error(self, metric: Any) -> tuple[Tensor, Tensor] | None:
        """Return the values' standard errors due to the estimator's sampling, and their degrees of freedom, both
        ``[n, M]``; None if these errors are not known.
        """
        return None

    def diagnostics(self, metric: Any) -> dict[str, Tensor]:
        """Return further values to log, ``{name: value}``; by default there are none."""
        return {}

    def prior(self, num_clients: int | None) -> float | None:
        """Return the value that samplers and aggregators assume for a client that never took part; return None if they
        get NaN.

        Args:
            num_clients: n, the number of clients; None: it is not known yet.
        """
        if self.init == "uniform":
            return None if num_clients is None else 1 / num_clients
        return self.init


def freedom_of(estimate: ShapleyEstimate) -> Tensor:
    """Return the degrees of freedom of an estimate, float64, broadcast to the shape of its ``stderr``."""
    return torch.as_tensor(estimate.freedom, dtype=torch.float64).expand(estimate.stderr.shape)
