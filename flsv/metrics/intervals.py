"""Intervals of a metric's values, from the spread of rounds or the estimator's standard error."""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor
from torchmetrics import Metric

from flsv.functional.confidence import half_width, t_quantile
from flsv.functional.moving_average import momentum_squares
from flsv.functional.streaming_variance import WIDTH, spread_add, spread_merge, spread_variance, step_variance

#: Of the intervals in the reports.
LEVEL = 0.9
OverRounds = Literal["sum", "momentum", "mean"] | None


class WithIntervals(Metric):
    """Base class of metrics whose value is made of the values of single rounds.

    A subclass that has intervals says in ``over_rounds`` how rounds come together, and tells each round's own values
    to :meth:`note_round` in ``update``. That is all: the state ``round_spread`` is added, saved and merged with the
    others, and tables, charts, reports and ``flsv bench`` show the intervals.

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
    """How a client's value is made of its rounds' own: their weighted sum, moving average or mean. None: by nothing
    that an interval is known of.

    A value that is the sum of p such parts has p rows a client in ``round_spread``, part by part. Half its interval is
    the sum of the parts' halves, as if they swung together: too wide where they do not."""

    momentum: float = 0.0
    init: Any = None
    rounds: Tensor
    round_spread: Tensor

    def intervals(self, level: float = LEVEL, value: Tensor | None = None) -> tuple[Tensor, Tensor] | None:
        """Low and high ends ``[num_clients]`` of an interval around every client's overall value.

        It is of the value that the same training would have given with other rounds of its kind: half its width is
        Student's t quantile times the standard error that follows, for a sum, from the differences of the client's
        successive rounds, else from a block bootstrap of its round values (both in closed form, see
        :mod:`flsv.functional.streaming_variance`), or Student's t quantile times the estimator's standard error where
        that is known and larger. What rounds add to a sum may fall or rise in the course of training: of that, the
        steps from round to round count as spread, so that few rounds with steep gains make it too wide. Of a metric
        that keeps the last round's value alone it is the spread of single rounds. **Not** in it: what another seed,
        other participants or another validation set would give (for seeds see ``flsv repeat``), nor by how far the
        metric misses a retrained game.

        Args:
            level: in (0, 1).
            value: the clients' overall values ``[num_clients]``; by default the present ones.

        Returns:
            None for a metric that knows of none. NaN for a client with less than two rounds and no standard error.

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
            value = self.per_client(self.compute())  # type: ignore[operator]
        variance, freedom = self._variance()
        half = half_width(variance * self._squares(), freedom, level).to(value)
        half = half.view(-1, len(value)).sum(0)  # of several parts, see over_rounds
        error = self.diagnostics().get("stderr")  # type: ignore[operator]
        if error is not None and error.shape == half.shape:
            # Of an exact estimate it is 0, and says nothing of the rounds.
            quantile = t_quantile(level, self.error_freedom()).to(half)
            half = half.fmax(quantile * error.to(half).where(error.to(half) > 0, half.new_tensor(float("nan"))))
        return self._bounded(value - half), self._bounded(value + half)

    def _variance(self) -> tuple[Tensor, Tensor]:
        """Of a round's own value, and its degrees of freedom; a row each of ``round_spread``."""
        if self.over_rounds == "sum":
            return step_variance(self.round_spread)
        variance, blocks = spread_variance(self.round_spread)
        return variance, blocks - 1

    def error_freedom(self) -> Tensor | float:
        """Degrees of freedom of the standard errors in ``diagnostics``, ``[num_clients]`` or one number for all."""
        return math.inf

    def _bounded(self, end: Tensor) -> Tensor:
        low, high = self.plot_lower_bound, self.plot_upper_bound
        return end if low is None and high is None else end.clamp(low, high)

    def _squares(self) -> Tensor:
        """The sum of the squared factors of a client's rounds ``[n]``."""
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
        """A round's own overall values ``[k]``, once in every ``update``; nothing without ``over_rounds``.

        Args:
            client_ids: ``[k]``, whose.
            values: ``[k]``, what the round alone says of each, over all classes.
            factor: with which a ``"sum"`` takes them in, ``[k]`` or one for all; the client's own, as by its chance to
                be drawn.
            keep: what all earlier factors are multiplied by, where the past counts less.
        """
        if self.over_rounds is not None:
            self.round_spread = spread_add(self.round_spread, client_ids, values.detach(), factor, keep)
