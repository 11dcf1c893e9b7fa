"""Intervals of a metric's values, from the spread of the rounds' values and the estimator's standard error."""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor
from torchmetrics import Metric

from flsv.functional.confidence import half_width, t_quantile
from flsv.functional.moving_average import momentum_squares
from flsv.functional.streaming_variance import WIDTH, spread_add, spread_merge, spread_variance, step_variance

#: Confidence level of the intervals in the reports.
LEVEL = 0.9
OverRounds = Literal["sum", "momentum", "mean"] | None


class WithIntervals(Metric):
    """Base class that adds intervals to metrics which combine the values of single rounds.

    A subclass declares in ``over_rounds`` how it combines rounds, and its ``update`` passes the values of each round to
    :meth:`note_round`, which adds them to the state ``round_spread``. From this state :meth:`intervals` computes the
    intervals in tables, charts, reports and ``flsv bench``. If ``over_rounds`` is None, there are no intervals.

    Example:
        >>> from flsv.metrics.base import ContributionMetric
        >>> class MeanNorm(ContributionMetric):
        ...     per_class, over_rounds = False, "mean"
        ...     def init_states(self, num_clients, num_classes):
        ...         self.add_state("total", torch.zeros(num_clients), dist_reduce_fx="sum")
        ...         self.add_state("seen", torch.zeros(num_clients), dist_reduce_fx="sum")
        ...     def update(self, client_ids, client_updates):
        ...         norms = client_updates.norm(dim=1)
        ...         self.total[client_ids] += norms
        ...         self.seen[client_ids] += 1
        ...         self.note_round(client_ids, norms)
        ...     def compute(self):
        ...         return self.total / self.seen  # 0 / 0 is NaN
        >>> metric = MeanNorm(num_clients=2)
        >>> for length in (1.0, 2.0, 1.5, 1.7):
        ...     metric.update(torch.tensor([0, 1]), torch.tensor([[length, 0.0], [0.0, 3.0]]))
        >>> low, high = metric.intervals()
        >>> bool(low[0] < metric.compute()[0] < high[0]), float(high[1] - low[1])
        (True, 0.0)
    """

    over_rounds: OverRounds = None
    """How a client's value is computed from the values of its rounds: ``"sum"`` (weighted), ``"momentum"`` (moving
    average) or ``"mean"``. None: in another way; then there are no intervals.

    A metric whose value is a sum of p such terms has p n rows in ``round_spread`` for n clients, term after term. Half
    the width of an interval is then the sum of the terms' half widths, which is too wide unless the terms are perfectly
    correlated.
    """

    momentum: float = 0.0
    init: Any = None
    rounds: Tensor
    round_spread: Tensor

    def intervals(self, level: float = LEVEL, value: Tensor | None = None) -> tuple[Tensor, Tensor] | None:
        """Compute the low and high ends ``[num_clients]`` of an interval around every client's value over all rounds.

        The interval is for the value that the same training would give with other, similar rounds. Half its width is
        Student's t quantile times a standard error. The standard error of a sum comes from the differences between the
        client's successive rounds, that of an average from a block bootstrap of its rounds' values (both in closed
        form, see :mod:`flsv.functional.streaming_variance`). If the interval from ``stderr`` in ``diagnostics`` is
        wider, that one is used. Changes of the rounds' values in the course of training count as spread, so few rounds
        with steep gains make the interval too wide. For a metric that keeps the last round's value only, the width is
        the spread of single rounds. **Not** covered are other seeds (see ``flsv repeat``), participants and validation
        sets, and the metric's difference from values by retraining.

        Args:
            level: the confidence level, in (0, 1).
            value: the clients' values ``[num_clients]`` over all rounds; by default the current values.

        Returns:
            The low and the high ends, clipped to the metric's bounds; NaN for a client with fewer than two rounds and
            no standard error. None for a metric without intervals.

        Example:
            >>> from flsv.metrics import CumulativeShapley
            >>> metric = CumulativeShapley(num_clients=2)
            >>> for worth in (1.0, 3.0, 2.0):
            ...     metric.update(torch.arange(2), lambda masks: masks.float() @ torch.tensor([worth, 2.0]))
            >>> metric.intervals()
            (tensor([-0.7470,  6.0000]), tensor([12.7470,  6.0000]))
        """
        if not 0 < level < 1:
            raise ValueError(f"level={level}: expected a number between 0 and 1, such as 0.9.")
        if self.over_rounds is None:
            return None
        if value is None:
            value = self.per_client(self.compute())  # type: ignore[operator]  # ContributionMetric has it
        variance, freedom = self._variance()
        half = half_width(variance * self._squares(), freedom, level).to(value)
        half = half.view(-1, len(value)).sum(0)  # of several parts, see over_rounds
        error = self.diagnostics().get("stderr")  # type: ignore[operator]  # likewise
        if error is not None and error.shape == half.shape:
            # An exact estimate's error is 0, whatever the spread of the rounds.
            quantile = t_quantile(level, self.error_freedom()).to(half)
            half = half.fmax(quantile * error.to(half).where(error.to(half) > 0, half.new_tensor(float("nan"))))
        return self._bounded(value - half), self._bounded(value + half)

    def _variance(self) -> tuple[Tensor, Tensor]:
        """Estimate the variance of a client's single-round values, one for each row of ``round_spread``; return the
        estimates and their degrees of freedom.
        """
        if self.over_rounds == "sum":
            return step_variance(self.round_spread)
        variance, blocks = spread_variance(self.round_spread)
        return variance, blocks - 1

    def error_freedom(self) -> Tensor | float:
        """Return the degrees of freedom of the standard errors ``stderr`` in ``diagnostics``, ``[num_clients]`` or one
        number for all; by default inf.
        """
        return math.inf

    def _bounded(self, end: Tensor) -> Tensor:
        low, high = self.plot_lower_bound, self.plot_upper_bound
        return end if low is None and high is None else end.clamp(low, high)

    def _squares(self) -> Tensor:
        """Return, for each row of ``round_spread``, the sum of squares of the rounds' weights in the client's value."""
        count, factors = self.round_spread[:, 0], self.round_spread[:, 9]
        if self.over_rounds == "momentum":
            return momentum_squares(count, self.momentum, init=self.init is not None)
        return factors if self.over_rounds == "sum" else 1 / count.clamp_min(1)

    def _create_spread(self, num_clients: int) -> None:
        if self.over_rounds is not None:
            self.add_state("round_spread", torch.zeros(num_clients, WIDTH), dist_reduce_fx=spread_merge)

    def note_round(
        self, client_ids: Tensor, values: Tensor, factor: float | Tensor = 1.0, keep: float | Tensor = 1.0
    ) -> None:
        """Record the clients' values of a single round for the intervals; call it once in every ``update``.

        If ``over_rounds`` is None, nothing is recorded.

        Args:
            client_ids: ``[k]``, the ids of the round's k clients.
            values: ``[k]``, the clients' values from this round only, one number over all classes.
            factor: for ``over_rounds="sum"``, the round's weight in the sum, ``[k]`` or one number for all clients.
            keep: the number by which the weights of all earlier rounds are multiplied; 1 leaves them as they are.
        """
        if self.over_rounds is not None:
            self.round_spread = spread_add(self.round_spread, client_ids, values.detach(), factor, keep)
