"""Folds of published methods: ShapleyFL's surrogate values, and decayed sums of rounds' shares."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import torch
from annotated_types import Gt, Le
from torch import Tensor

from flsv.functional.shapley.decayed import round_factor, round_shares
from flsv.functional.shapley.game import ShapleyEstimate
from flsv.functional.shapleyfl import Normalization, normalize_shapley
from flsv.metrics.coalitions.folds import MovingAverage, Sum
from flsv.utilities.declared import Momentum, NonNegative, Rules, Share, checked
from flsv.utilities.errors import ConfigurationError


@checked
@dataclass(frozen=True)
class SurrogateAverage(MovingAverage):
    """Moving average of values normalized over the round's clients (ShapleyFL, definition 4.2 and equation 3).

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

    def _values_and_stderr(self, estimate: ShapleyEstimate) -> tuple[Tensor, Tensor]:
        # The error of the range (maximum minus minimum) is neglected: the standard error of a normalized value has no
        # simple form.
        values = estimate.values
        spread = values.amax(0)
        if self.normalize == "min-max":
            spread = spread - values.amin(0)
        scaled_stderr = estimate.stderr / spread
        stderr = torch.where(spread > 0, scaled_stderr, torch.nan)
        return normalize_shapley(values, self.normalize), stderr


@checked
@dataclass(frozen=True)
class Decay(Sum):
    """Decayed sum of each client's shares of the rounds' gains. See :func:`flsv.functional.decayed_shapley`.

    Args:
        decay: omega in (0, 1]: round t = 1, 2, ... has the weight omega^t.
        threshold: rounds with omega^t below this number are not evaluated. At most ``decay``.
        normalize: divide each round's values by their sum. False: the value is in the unit of the performance.
    """

    rules: ClassVar[Rules] = (
        (
            lambda arguments: arguments.threshold <= arguments.decay,
            "with a threshold above decay={decay} no round would be evaluated.",
        ),
    )
    decay: Annotated[float, Gt(0), Le(1)] = 0.8
    threshold: NonNegative = 0.0
    normalize: bool = True

    def check(self, owner: str, per_class: bool) -> None:
        if per_class and self.normalize:
            raise ConfigurationError(
                f"{owner}: values per class belong to one game per class, and have no common gain of which they could "
                "be shares. Set Decay(normalize=False)."
            )

    def init_states(self, metric: Any, num_clients: int, width: int) -> None:
        metric.add_state("total", torch.zeros(num_clients, width), dist_reduce_fx="sum")
        metric.add_state(
            "participations", torch.zeros(num_clients, dtype=torch.long), dist_reduce_fx="sum"
        )
        for name in ("skipped", "flagged", "truncated"):
            metric.add_state(name, torch.tensor(0), dist_reduce_fx="sum")

    def factor(self, round_index: int) -> float:
        return round_factor(round_index, self.decay, self.threshold)

    def update(
        self, metric: Any, client_ids: Tensor, estimate: ShapleyEstimate, factor: float
    ) -> None:
        shares, skipped, flagged = round_shares(estimate.values)
        values = shares if self.normalize else estimate.values
        rows = values.to(metric.total).reshape(len(client_ids), -1)  # [k, 1] or [k, M]
        metric.total[client_ids] += factor * rows
        metric.participations[client_ids] += 1
        metric.skipped += skipped
        metric.flagged += flagged

    def skip(self, metric: Any) -> None:
        metric.truncated += 1

    def error(self, metric: Any) -> None:
        return None

    def diagnostics(self, metric: Any) -> dict[str, Tensor]:
        """Return how many rounds were skipped (all values 0), flagged (sum not positive) and truncated (not
        evaluated).
        """
        return {
            "skipped": metric.skipped.clone(),
            "flagged": metric.flagged.clone(),
            "truncated": metric.truncated.clone(),
        }

    @property
    def unit(self) -> str:  # type: ignore[override]  # depends on the options
        """Unit of the value. A placeholder ``{}`` stands for the unit of a round's value."""
        return (
            "decayed sum of shares of the rounds' gains"
            if self.normalize
            else "{}, decayed sum over rounds"
        )
