"""Intervals of a metric's values, from the spread of the rounds' values and the estimator's standard error."""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor
from torchmetrics import Metric

from flsv.functional.confidence import half_width, t_quantile
from flsv.functional.moving_average import momentum_squares

# A metric's value is a weighted sum of single rounds' values. The block bootstrap (Künsch 1989) resamples blocks of
# rounds; in the limit of many draws its variance of the mean is the mean square of the blocks' deviations, computed
# here from sums over blocks in constant memory. Block j has floor(sqrt(j)) rounds: the last of T is then about T^(1/3)
# long, which has the least error (Hall, Horowitz and Jing 1995). Only a client's own rounds count. A client's row is
#
#     count | first | total | squares | cross | lengths | blocks | open total | open length | factors | last | steps
#
# count of rounds, values of the first and the last; total of the values; squares, cross and lengths: sums of S^2, S L
# and L^2 over the closed blocks, with S a block's sum and L its rounds; the same of the open block; factors: squared
# factors of the rounds in the metric's value; steps: squared differences of successive rounds. All sums are of values
# minus the first, against cancellation.
WIDTH = 12


def spread_add(
    rows: Tensor, client_ids: Tensor, values: Tensor, factor: float | Tensor = 1.0, keep: float | Tensor = 1.0
) -> Tensor:
    """Add a round's values ``[k]`` to the clients' rows ``[n, 12]`` of running sums."""
    rows = rows.clone()
    rows[client_ids] = _added(rows[client_ids], values.to(rows), factor, keep)
    return rows


def spread_merge(stretches: Tensor) -> Tensor:
    """Merge rows ``[W, n, 12]`` of successive periods, earliest first."""
    # A period of one round is added to the earlier periods' open block; before a longer one, which has its own, that
    # block ends.
    merged = stretches[0]
    for later in stretches[1:]:
        joined = torch.where(later[:, :1] == 1, _added(merged, later[:, 1], later[:, 9] ** 0.5), _merged(merged, later))
        joined = torch.where(later[:, :1] == 0, merged, joined)
        merged = torch.where(merged[:, :1] == 0, later, joined)
    return merged


def spread_variance(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the long-run variances ``[n]`` of single rounds' values, T times that of their mean, and block counts."""
    count, _, total, squares, cross, lengths, blocks, *_ = _closed(rows).unbind(-1)
    mean = total / count.clamp_min(1)
    deviations = (squares - 2 * mean * cross + mean.square() * lengths).clamp_min(0)
    variance = deviations / count.clamp_min(1) * blocks / (blocks - 1)
    return variance.masked_fill(blocks < 2, float("nan")), blocks


def step_variance(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the variances ``[n]`` of single rounds' values about their trend, and degrees of freedom."""
    # For metrics that sum rounds: values fall in the course of training, and deviations from the mean would count
    # this trend as error. Half the mean square of successive differences hardly does (von Neumann et al., Annals of
    # Mathematical Statistics 12, 1941). The freedom is 2 m^2 / (3 m - 1) for m differences, each of which shares a
    # round with the next.
    count, steps = rows[:, 0], rows[:, 11]
    differences = (count - 1).masked_fill(count < 2, float("nan"))
    return steps / differences / 2, 2 * differences.square() / (3 * differences - 1)


def _closed(rows: Tensor) -> Tensor:
    """Add each client's open block to its closed ones, and return the new rows ``[n, 12]``."""
    count, first, total, squares, cross, lengths, blocks, s, length, *others = rows.unbind(-1)
    none = torch.zeros_like(s)
    sums = (squares + s.square(), cross + s * length, lengths + length.square(), blocks + (length > 0))
    return torch.stack([count, first, total, *sums, none, none, *others], dim=-1)


def _added(rows: Tensor, values: Tensor, factor: float | Tensor, keep: float | Tensor = 1.0) -> Tensor:
    """Add a round's values ``[k]`` to the rows ``[k, 12]`` of its clients."""
    full = rows[:, 8] >= (rows[:, 6] + 1).sqrt().floor()
    rows = torch.where(full[:, None], _closed(rows), rows)
    count, first, total, squares, cross, lengths, blocks, s, length, factors, last, steps = rows.unbind(-1)
    steps = steps + (values - last).square() * (count > 0)
    first = torch.where(count > 0, first, values)
    value = values - first
    factors = factors * keep**2 + factor**2
    open_ = (s + value, length + 1)
    closed = (squares, cross, lengths, blocks)
    return torch.stack([count + 1, first, total + value, *closed, *open_, factors, values, steps], dim=-1)


def _merged(earlier: Tensor, later: Tensor) -> Tensor:
    """Merge the clients' rows ``[n, 12]`` of a later period into those of an earlier one."""
    count, first, total, squares, cross, lengths, blocks, _, _, factors, last, steps = _closed(earlier).unbind(-1)
    c, f, t, q, x, d, b, s, length, more, end, further = later.unbind(-1)
    shift = f - first  # the later's values are relative to its own first
    sums = (
        count + c,
        first,
        total + t + c * shift,
        squares + q + 2 * shift * x + shift.square() * d,
        cross + x + shift * d,
        lengths + d,
        blocks + b,
        s + length * shift,
        length,
        factors + more,
        end,
        steps + (f - last).square() + further,
    )
    return torch.stack(sums, dim=-1)


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
    average) or ``"mean"``. None: in another way. Then there are no intervals.

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
        form, see :mod:`flsv.metrics.intervals`). If the interval from ``stderr`` in ``diagnostics`` is
        wider, that one is used. Changes of the rounds' values in the course of training count as spread, so few rounds
        with steep gains make the interval too wide. For a metric that keeps the last round's value only, the width is
        the spread of single rounds. **Not** covered are other seeds (see ``flsv repeat``), participants and validation
        sets, and the metric's difference from values by retraining.

        Args:
            level: the confidence level, in (0, 1).
            value: the clients' values ``[num_clients]`` over all rounds. By default the current values.

        Returns:
            The low and the high ends, clipped to the metric's bounds. NaN for a client with fewer than two rounds and
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
        """Estimate the variance of a client's single-round values, one for each row of ``round_spread``. Return the
        estimates and their degrees of freedom.
        """
        if self.over_rounds == "sum":
            return step_variance(self.round_spread)
        variance, blocks = spread_variance(self.round_spread)
        return variance, blocks - 1

    def error_freedom(self) -> Tensor | float:
        """Return the degrees of freedom of the standard errors ``stderr`` in ``diagnostics``, ``[num_clients]`` or one
        number for all. By default inf.
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
        """Record the clients' values of a single round for the intervals. Call it once in every ``update``.

        If ``over_rounds`` is None, nothing is recorded.

        Args:
            client_ids: ``[k]``, the ids of the round's k clients.
            values: ``[k]``, the clients' values from this round only, one number over all classes.
            factor: for ``over_rounds="sum"``, the round's weight in the sum, ``[k]`` or one number for all clients.
            keep: the number by which the weights of all earlier rounds are multiplied. 1 leaves them as they are.
        """
        if self.over_rounds is not None:
            self.round_spread = spread_add(self.round_spread, client_ids, values.detach(), factor, keep)
