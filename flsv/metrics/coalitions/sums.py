"""Sums of the rounds' values: plain and decayed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch
from annotated_types import Gt, Le
from torch import Tensor

from flsv.functional import ShapleyEstimate
from flsv.functional.shapley.decayed import round_factor, round_shares
from flsv.metrics.coalitions.fold import Fold, freedom_of
from flsv.metrics.intervals import OverRounds
from flsv.utilities.declared import NonNegative, Rules, checked
from flsv.utilities.errors import ConfigurationError


@checked
@dataclass(frozen=True)
class Sum(Fold):
    """Fold that sums up each client's values over the rounds in which the client took part.

    The rounds' estimates are independent, so the variance of the sum is the sum of their variances.
    """

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
        # Satterthwaite's degrees of freedom of a sum of estimated variances.
        known = metric.variance_squares > 0
        return stderr, torch.where(known, metric.variance**2 / metric.variance_squares, torch.inf)


@checked
@dataclass(frozen=True)
class Decay(Sum):
    """Fold that sums up each client's shares of the rounds' gains, with weights that decay from round to round; see
    :func:`flsv.functional.decayed_shapley`.

    Args:
        decay: omega in (0, 1]: round t = 1, 2, ... has the weight omega^t.
        threshold: rounds with omega^t below this number are not evaluated; at most ``decay``.
        normalize: divide each round's values by their sum; if False, the value is in the unit of the performance.
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
        """Return how many rounds were ``skipped``, because all values were 0; ``flagged``, because the values' sum was
        not positive; and ``truncated``, that is not evaluated because of the threshold.
        """
        return {name: getattr(metric, name).clone() for name in ("skipped", "flagged", "truncated")}

    @property
    def unit(self) -> str:  # type: ignore[override]  # depends on the options
        """Unit of the value; a placeholder ``{}`` stands for the unit of a round's value."""
        return "decayed sum of shares of the rounds' gains" if self.normalize else "{}, decayed sum over rounds"
