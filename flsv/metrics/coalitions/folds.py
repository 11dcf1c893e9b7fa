"""Folds: combine the values of rounds into one value: the last one, a moving average or a sum."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from flsv.functional import ShapleyEstimate
from flsv.functional.moving_average import momentum_add, momentum_merge, momentum_value
from flsv.metrics.base import latest
from flsv.utilities.declared import Momentum, checked
from flsv.utilities.wings import from_wing


class Fold(ABC):
    """Base class of folds, which combine a client's values of single rounds into one.

    A fold stores its states in the ``metric``, a :class:`flsv.metrics.CoalitionValue`, which calls :meth:`update` after
    each round. The shapes have n clients, k of them players of the round, and M columns (classes, or 1).
    """

    limits: ClassVar[tuple[float | None, float | None]] = (None, None)
    """The least and the largest possible value."""
    unit: ClassVar[str] = "{}"
    """Unit of the value. The placeholder ``{}`` stands for the unit of a round's value."""
    sign: ClassVar[str] = (
        "positive: the coalitions do better with the client; negative: worse; 0: no difference."
    )
    """Meaning of positive, negative and zero values."""
    momentum: float = 0.0
    init: float | Literal["uniform"] | None = None

    def check(self, owner: str, per_class: bool) -> None:  # noqa: B027
        """Raise ConfigurationError if an argument is out of range or the fold cannot combine values per class.
        ``owner`` is the metric's name, for messages.
        """

    @abstractmethod
    def init_states(self, metric: Any, num_clients: int, width: int) -> None:
        """Declare the fold's states in the metric, with ``width`` columns (the number of classes, or 1)."""

    def factor(self, round_index: int) -> float:
        """Return the factor by which this round's values are multiplied. If it is 0, the round's game is not
        evaluated.
        """
        return 1.0

    @abstractmethod
    def update(
        self, metric: Any, client_ids: Tensor, estimate: ShapleyEstimate, factor: float
    ) -> None:
        """Add a round's estimate, multiplied by ``factor`` (1 unless :meth:`factor` is overridden), to the states."""

    def skip(self, metric: Any) -> None:  # noqa: B027
        """Count a round whose game is not evaluated."""

    @abstractmethod
    def compute(self, metric: Any) -> Tensor:
        """Compute the values ``[n, M]``, NaN for clients that never took part."""

    def error(self, metric: Any) -> Tensor | None:
        """Return the values' standard error ``[n, M]`` due to sampling. None if it is not known."""
        return None

    def diagnostics(self, metric: Any) -> dict[str, Tensor]:
        """Return further values to log, ``{name: value}``."""
        return {}

    def prior(self, num_clients: int | None) -> float | None:
        """Return the value that samplers and aggregators assume for a client that never took part, by default ``init``.

        Args:
            num_clients: n. With ``init="uniform"`` the value is 1 / n. None if it is not known yet.

        Returns:
            The value, or None if there is none: samplers and aggregators then get NaN for the client.
        """
        if self.init == "uniform":
            return None if num_clients is None else 1 / num_clients
        return self.init


@checked
@dataclass(frozen=True)
class MovingAverage(Fold):
    """Moving average of each client's values over its rounds.

    Args:
        momentum: mu in [0, 1), the weight of the past. With 0 the value is that of the client's last round.
        init: the value before a client's first round, from which the average starts: a number, or ``"uniform"``, 1/n.
            None: the average starts at the first round's value.
    """

    momentum: Momentum = 0.9
    init: float | Literal["uniform"] | None = None

    def init_states(self, metric: Any, num_clients: int, width: int) -> None:
        merge = partial(momentum_merge, momentum=self.momentum)
        metric.add_state("history", torch.zeros(num_clients, 2 * width + 1), dist_reduce_fx=merge)
        metric.add_state(
            "stderr", torch.full((num_clients, width), float("nan")), dist_reduce_fx=latest
        )

    def update(
        self, metric: Any, client_ids: Tensor, estimate: ShapleyEstimate, factor: float
    ) -> None:
        values, stderr = self._values_and_stderr(estimate)
        num_players = len(client_ids)
        rows = values.to(metric.history).reshape(num_players, -1)  # [k, 1] or [k, M]
        metric.history = momentum_add(metric.history, client_ids, rows, self.momentum)
        # Clients of other rounds keep the errors that they have.
        stderr_of_round = torch.full_like(metric.stderr, float("nan"))
        stderr_rows = stderr.to(metric.history).reshape(rows.shape)
        stderr_of_round[client_ids] = stderr_rows
        metric.stderr = latest(torch.stack([metric.stderr, stderr_of_round]))  # skips NaN

    def _values_and_stderr(self, estimate: ShapleyEstimate) -> tuple[Tensor, Tensor]:
        """Return the values and standard errors that enter the average: the round's estimate."""
        return estimate.values, estimate.stderr

    def compute(self, metric: Any) -> Tensor:
        return momentum_value(metric.history, self.momentum, init=self.prior(metric.num_clients))

    def error(self, metric: Any) -> Tensor:
        return metric.stderr


@checked
@dataclass(frozen=True)
class Sum(Fold):
    """Sum of each client's values over its rounds.

    The rounds' estimates are independent, so the variance of the sum is the sum of their variances.
    """

    unit: ClassVar[str] = "{}, sum over rounds"

    def init_states(self, metric: Any, num_clients: int, width: int) -> None:
        for name in ("total", "variance"):
            metric.add_state(name, torch.zeros(num_clients, width), dist_reduce_fx="sum")
        metric.add_state(
            "participations", torch.zeros(num_clients, dtype=torch.long), dist_reduce_fx="sum"
        )

    def update(
        self, metric: Any, client_ids: Tensor, estimate: ShapleyEstimate, factor: float
    ) -> None:
        values = estimate.values.to(metric.total).reshape(len(client_ids), -1)  # [k, 1] or [k, M]
        stderr = estimate.stderr.to(metric.variance).reshape(values.shape)
        metric.total[client_ids] += values
        metric.variance[client_ids] += stderr**2  # the rounds' errors are independent
        metric.participations[client_ids] += 1

    def compute(self, metric: Any) -> Tensor:
        return metric.total.masked_fill(metric.participations[:, None] == 0, float("nan"))

    def error(self, metric: Any) -> Tensor | None:
        never_took_part = metric.participations[:, None] == 0
        return metric.variance.sqrt().masked_fill(never_took_part, float("nan"))


FoldName = Literal["last", "average", "surrogate", "sum", "decay"]
#: ``{name: fold with its default arguments}``, without those of methods.
FOLDS: dict[FoldName, Fold] = {
    "last": MovingAverage(0.0),
    "average": MovingAverage(),
    "sum": Sum(),
}


def fold_named(name: FoldName) -> Fold:
    """Return the fold of this name, with its default arguments."""
    if name in FOLDS:
        return FOLDS[name]
    fold: Fold = from_wing("folds", name)()
    return fold
