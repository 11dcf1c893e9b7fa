"""Combines the values of rounds: the last, a moving average, a sum, a decayed sum, a lower bound.

A fold declares states in the metric that it folds for, ``[n, M]`` each (M is 1 where values are not per class), adds a
round's estimate to them, reads the value and its standard error from them, and says what intervals are made of. The
states' reductions merge two stretches of rounds, the later one second.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

import torch
from annotated_types import Gt, Le
from torch import Tensor

from flsv.functional import ShapleyEstimate, normalize_shapley
from flsv.functional.confidence import Confidence, lower_bound
from flsv.functional.moving_average import momentum_add, momentum_merge, momentum_value
from flsv.functional.shapley.decayed import round_factor, round_shares
from flsv.functional.shapley.normalize import Normalization
from flsv.metrics.base import latest
from flsv.metrics.intervals import OverRounds
from flsv.utilities.declared import Momentum, NonNegative, Rules, Share, checked
from flsv.utilities.errors import ConfigurationError


def merged_moments(states: Tensor) -> Tensor:
    """Counts, means and sums of squared deviations of stretches of rounds, ``[W, n, 2M+1]``, as those of all of them.

    After Chan, Golub and LeVeque 1983. A row is count [1] | mean [M] | squares [M].
    """
    merged = states[0]
    width = (merged.shape[-1] - 1) // 2
    for later in states[1:]:
        count, more = merged[:, :1], later[:, :1]
        total = (count + more).clamp_min(1)
        shift = later[:, 1 : 1 + width] - merged[:, 1 : 1 + width]
        mean = merged[:, 1 : 1 + width] + shift * more / total
        squares = merged[:, 1 + width :] + later[:, 1 + width :] + shift.square() * count * more / total
        merged = torch.cat([count + more, mean, squares], dim=1)
    return merged


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


@checked
@dataclass(frozen=True)
class MovingAverage(Fold):
    """A moving average over a client's rounds.

    Args:
        momentum: mu in [0, 1), the weight of the past; 0: the last round's value.
        init: the value before a client's first round, from which the average starts: a number, or ``"uniform"``, 1/n.
            None: there is none, the average starts at the first round's value.
    """

    over_rounds: ClassVar[OverRounds] = "momentum"

    momentum: Momentum = 0.9
    init: float | Literal["uniform"] | None = None

    def init_states(self, metric: Any, num_clients: int, width: int) -> None:
        merge = partial(momentum_merge, momentum=self.momentum)
        metric.add_state("history", torch.zeros(num_clients, 2 * width + 1), dist_reduce_fx=merge)
        for name in ("stderr", "freedom"):
            metric.add_state(name, torch.full((num_clients, width), float("nan")), dist_reduce_fx=latest)

    def update(self, metric: Any, client_ids: Tensor, estimate: ShapleyEstimate, factor: float) -> Tensor:
        values, stderr = (value.to(metric.history).reshape(len(client_ids), -1) for value in self._read(estimate))
        metric.history = momentum_add(metric.history, client_ids, values, self.momentum)
        freedom = freedom_of(estimate).to(metric.freedom).reshape(len(client_ids), -1)
        for name, found in (("stderr", stderr), ("freedom", freedom)):
            before = getattr(metric, name)
            now = torch.full_like(before, float("nan"))
            now[client_ids] = found
            setattr(metric, name, latest(torch.stack([before, now])))
        return values

    def _read(self, estimate: ShapleyEstimate) -> tuple[Tensor, Tensor]:
        """What a round contributes, and its standard error."""
        return estimate.values, estimate.stderr

    def compute(self, metric: Any) -> Tensor:
        return momentum_value(metric.history, self.momentum, init=self.prior(metric.num_clients))

    def error(self, metric: Any) -> tuple[Tensor, Tensor]:
        return metric.stderr, metric.freedom


@checked
@dataclass(frozen=True)
class SurrogateAverage(MovingAverage):
    """A moving average of each round's values, normalized over its cohort (ShapleyFL, definition 4.2 and equation 3).

    Args:
        momentum: beta in [0, 1), the weight of the past.
        init: the value in [0, 1] before a client's first round. None: the average starts at the first round's.
        normalize: ``"min-max"`` or ``"positive"``, see :func:`flsv.functional.normalize_shapley`.
    """

    limits = (0.0, 1.0)
    unit = "surrogate value"
    sign = "from 0 to 1, compared with the others of the cohort: 0 is the least of them, which may still help."

    momentum: Momentum = 0.7
    init: Share | Literal["uniform"] | None = 0.5
    normalize: Normalization = "min-max"

    def _read(self, estimate: ShapleyEstimate) -> tuple[Tensor, Tensor]:
        # The spread of the values' own range is left out: the error of a normalized value has no simple form.
        values = estimate.values
        spread = values.amax(0) - (values.amin(0) if self.normalize == "min-max" else 0)
        stderr = torch.where(spread > 0, estimate.stderr / spread, float("nan"))
        return normalize_shapley(values, self.normalize), stderr


@checked
@dataclass(frozen=True)
class Sum(Fold):
    """The sum over the rounds in which a client took part. The rounds' standard errors, which are independent, add in
    squares."""

    over_rounds: ClassVar[OverRounds] = "sum"
    unit: ClassVar[str] = "{}, sum over rounds"

    def init_states(self, metric: Any, num_clients: int, width: int) -> None:
        for name in ("total", "variance", "variance_squares"):
            metric.add_state(name, torch.zeros(num_clients, width), dist_reduce_fx="sum")
        metric.add_state("seen", torch.zeros(num_clients, dtype=torch.long), dist_reduce_fx="sum")

    def update(self, metric: Any, client_ids: Tensor, estimate: ShapleyEstimate, factor: float) -> Tensor:
        values = estimate.values.to(metric.total).reshape(len(client_ids), -1)
        metric.total[client_ids] += values
        variance = estimate.stderr.to(metric.variance).reshape(values.shape) ** 2
        metric.variance[client_ids] += variance
        freedom = freedom_of(estimate).to(variance).reshape(values.shape)
        metric.variance_squares[client_ids] += variance**2 / freedom
        metric.seen[client_ids] += 1
        return values

    def compute(self, metric: Any) -> Tensor:
        return metric.total.masked_fill(metric.seen[:, None] == 0, float("nan"))

    def error(self, metric: Any) -> tuple[Tensor, Tensor] | None:
        stderr = metric.variance.sqrt().masked_fill(metric.seen[:, None] == 0, float("nan"))
        # Satterthwaite: of a sum of variances, each of which is estimated.
        known = metric.variance_squares > 0
        return stderr, torch.where(known, metric.variance**2 / metric.variance_squares, torch.inf)


@checked
@dataclass(frozen=True)
class Decay(Sum):
    """The sum of each client's shares of the rounds' gains, early rounds counting most; see
    :mod:`flsv.functional.shapley.decayed`.

    Args:
        decay: omega in (0, 1]; round t = 1, 2, ... counts omega^t.
        threshold: rounds with omega^t below it are not played at all; at most ``decay``.
        normalize: divide each round's values by their sum; else the value is in the unit of the performance.
    """

    rules: ClassVar[Rules] = (
        (lambda given: given.threshold <= given.decay, "above decay={decay} no round would be evaluated."),
    )
    decay: Annotated[float, Gt(0), Le(1)] = 0.8
    threshold: NonNegative = 0.0
    normalize: bool = True

    def check(self, owner: str, per_class: bool) -> None:
        if per_class and self.normalize:
            raise ConfigurationError(
                f"{owner}: shares of a round's gain are those of one game, and values per class are of several. Say "
                "Decay(normalize=False)."
            )

    def init_states(self, metric: Any, num_clients: int, width: int) -> None:
        metric.add_state("total", torch.zeros(num_clients, width), dist_reduce_fx="sum")
        metric.add_state("seen", torch.zeros(num_clients, dtype=torch.long), dist_reduce_fx="sum")
        for name in ("skipped", "flagged", "truncated"):
            metric.add_state(name, torch.tensor(0), dist_reduce_fx="sum")

    def factor(self, round_index: int) -> float:
        return round_factor(round_index, self.decay, self.threshold)

    def update(self, metric: Any, client_ids: Tensor, estimate: ShapleyEstimate, factor: float) -> Tensor:
        shares, skipped, flagged = round_shares(estimate.values)
        values = (shares if self.normalize else estimate.values).to(metric.total).reshape(len(client_ids), -1)
        metric.total[client_ids] += factor * values
        metric.seen[client_ids] += 1
        metric.skipped += skipped
        metric.flagged += flagged
        return values

    def skip(self, metric: Any) -> None:
        metric.truncated += 1

    def error(self, metric: Any) -> None:
        return None

    def diagnostics(self, metric: Any) -> dict[str, Tensor]:
        """How many rounds were skipped, flagged, and not played."""
        return {name: getattr(metric, name).clone() for name in ("skipped", "flagged", "truncated")}

    @property
    def unit(self) -> str:  # type: ignore[override]
        """Of the value, with the unit of a round's in its place."""
        return "decayed sum of shares of the rounds' gains" if self.normalize else "{}, decayed sum over rounds"


@checked
@dataclass(frozen=True)
class LowerBound(Sum):
    """A one-sided lower confidence bound of a client's mean over its rounds; see :func:`flsv.functional.lower_bound`.

    Args:
        confidence: in [0.5, 1); 0.5 is the mean itself.
    """

    over_rounds: ClassVar[OverRounds] = None  # it is the end of an interval
    unit: ClassVar[str] = "{} a round, lower bound"
    sign = "what a round gains by the client at least; below 0: it is not established that it gains anything."

    confidence: Confidence = 0.9

    def init_states(self, metric: Any, num_clients: int, width: int) -> None:
        super().init_states(metric, num_clients, width)
        metric.add_state("moments", torch.zeros(num_clients, 2 * width + 1), dist_reduce_fx=merged_moments)

    def update(self, metric: Any, client_ids: Tensor, estimate: ShapleyEstimate, factor: float) -> Tensor:
        values = super().update(metric, client_ids, estimate, factor)
        now = torch.zeros_like(metric.moments)
        now[client_ids] = torch.cat([torch.ones_like(values[:, :1]), values, torch.zeros_like(values)], dim=1)
        metric.moments = merged_moments(torch.stack([metric.moments, now]))
        return values

    def compute(self, metric: Any) -> Tensor:
        count, mean, squares = self._moments(metric)
        return lower_bound(count.expand_as(mean), mean, squares, metric.variance.sqrt(), self.confidence).to(mean)

    def error(self, metric: Any) -> None:
        return None

    def diagnostics(self, metric: Any) -> dict[str, Tensor]:
        """Each client's mean."""
        count, mean, _ = self._moments(metric)
        return {} if metric.per_class else {"mean": mean.masked_fill(count == 0, float("nan")).squeeze(-1)}

    @staticmethod
    def _moments(metric: Any) -> tuple[Tensor, Tensor, Tensor]:
        width = metric.total.shape[1]
        return metric.moments[:, :1], metric.moments[:, 1 : 1 + width], metric.moments[:, 1 + width :]


def freedom_of(estimate: ShapleyEstimate) -> Tensor:
    """Of the standard error's shape."""
    return torch.as_tensor(estimate.freedom, dtype=torch.float64).expand(estimate.stderr.shape)


FoldName = Literal["last", "average", "surrogate", "sum", "decay", "lower_bound"]
#: With the arguments that they have of themselves.
FOLDS: dict[FoldName, Fold] = {
    "last": MovingAverage(0.0),
    "average": MovingAverage(),
    "surrogate": SurrogateAverage(),
    "sum": Sum(),
    "decay": Decay(),
    "lower_bound": LowerBound(),
}
