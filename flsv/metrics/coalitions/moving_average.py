"""Moving averages of the rounds' values, plain and normalized."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from flsv.functional import ShapleyEstimate, normalize_shapley
from flsv.functional.moving_average import momentum_add, momentum_merge, momentum_value
from flsv.functional.shapley.normalize import Normalization
from flsv.metrics.base import latest
from flsv.metrics.coalitions.fold import Fold, freedom_of
from flsv.metrics.intervals import OverRounds
from flsv.utilities.declared import Momentum, Share, checked


@checked
@dataclass(frozen=True)
class MovingAverage(Fold):
    """Fold that keeps a moving average of each client's values over the rounds in which the client took part.

    Args:
        momentum: mu in [0, 1), the weight of the past; with 0 the value is that of the client's last round.
        init: the value before a client's first round, from which the average starts: a number, or ``"uniform"``, 1/n.
            None: the average starts at the first round's value.
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
        for name, new in (("stderr", stderr), ("freedom", freedom)):
            before = getattr(metric, name)
            now = torch.full_like(before, float("nan"))
            now[client_ids] = new
            setattr(metric, name, latest(torch.stack([before, now])))
        return values

    def _read(self, estimate: ShapleyEstimate) -> tuple[Tensor, Tensor]:
        """Return the values and standard errors that enter the average: here those of the round's estimate, in
        :class:`SurrogateAverage` the normalized ones."""
        return estimate.values, estimate.stderr

    def compute(self, metric: Any) -> Tensor:
        return momentum_value(metric.history, self.momentum, init=self.prior(metric.num_clients))

    def error(self, metric: Any) -> tuple[Tensor, Tensor]:
        return metric.stderr, metric.freedom


@checked
@dataclass(frozen=True)
class SurrogateAverage(MovingAverage):
    """Fold that normalizes each round's values over the round's clients and keeps a moving average of the results
    (ShapleyFL, definition 4.2 and equation 3).

    Args:
        momentum: beta in [0, 1), the weight of the past.
        init: the value in [0, 1] before a client's first round. None: the average starts at the first round's value.
        normalize: ``"min-max"`` or ``"positive"``, see :func:`flsv.functional.normalize_shapley`.
    """

    limits = (0.0, 1.0)
    unit = "surrogate value"
    sign = "from 0 to 1, compared with the others of the cohort: 0 is the least of them, which may still help."

    momentum: Momentum = 0.7
    init: Share | Literal["uniform"] | None = 0.5
    normalize: Normalization = "min-max"

    def _read(self, estimate: ShapleyEstimate) -> tuple[Tensor, Tensor]:
        # The error of the range (maximum minus minimum) is neglected: the standard error of a normalized value has no
        # simple form.
        values = estimate.values
        spread = values.amax(0) - (values.amin(0) if self.normalize == "min-max" else 0)
        stderr = torch.where(spread > 0, estimate.stderr / spread, float("nan"))
        return normalize_shapley(values, self.normalize), stderr
