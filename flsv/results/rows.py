"""ResultBuilder: creates the rows of a run's table from the metrics' values after a round."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torchmetrics import Metric

from flsv.core.values import Values, on_cpu
from flsv.metrics import ContributionMetric
from flsv.results.round_result import TRAIN_LOSS, Event, RoundResult, Row
from flsv.utilities.csv_files import NAN
from flsv.utilities.display import INTERVAL_LEVEL, label_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def column_names(metric: Metric) -> list[str] | None:
    """Return the names of a metric's columns. None if they are classes, or it has none."""
    if not isinstance(metric, ContributionMetric):
        return None
    return metric.columns()


def client_rows(
    index: int,
    metric: str,
    numbers: Mapping[int, float],
    client_names: Sequence[str],
    *,
    column: str = "",
    class_name: str = "",
    intervals: Mapping[int, Sequence[float]] = {},
) -> list[Row]:
    """Return a round's rows of one metric and column, one for each client's number that is not NaN.

    Example:
        >>> rows = client_rows(0, "weight", {0: 0.75, 1: 0.25, 2: math.nan}, ["Boston", "Lyon", "Graz"])
        >>> [(row.client_name, row.value) for row in rows]
        [('Boston', 0.75), ('Lyon', 0.25)]
    """
    rows = []
    for client, number in numbers.items():
        if math.isnan(number):
            continue
        low, high = intervals.get(client, (NAN, NAN))
        row = Row(
            index,
            metric,
            client=client,
            column=column,
            value=number,
            client_name=client_names[client],
            class_name=class_name,
            low=low,
            high=high,
        )
        rows.append(row)
    return rows


def changed_numbers(
    numbers: Mapping[str, Values], earlier: Mapping[str, Values]
) -> dict[str, Values]:
    """Return the ``numbers`` with NaN for each client's number that is the same in ``earlier``.

    A number with another interval than before has changed. Numbers of the whole federation are always new.
    """
    changed = {}
    for name, values in numbers.items():
        is_of_federation = values.overall.ndim == 0
        if is_of_federation or name not in earlier:
            changed[name] = values
        else:
            changed[name] = _changed(values, earlier[name])
    return changed


def _changed(values: Values, earlier: Values) -> Values:
    has_other_value = values.overall != earlier.overall
    is_changed = has_other_value | _has_other_interval(values, earlier)
    return replace(
        values,
        value=values.value.where(values.value != earlier.value, NAN),
        overall=values.overall.where(is_changed, NAN),
    )


def _has_other_interval(values: Values, earlier: Values) -> Tensor:
    """Return which clients have an interval, and another than before."""
    if values.low is None or values.high is None:
        return torch.zeros_like(values.overall, dtype=torch.bool)
    has_interval = ~values.low.isnan()
    if earlier.low is None or earlier.high is None:
        return has_interval
    return has_interval & ((values.low != earlier.low) | (values.high != earlier.high))


def kinds_of_intervals(values: Mapping[str, Values]) -> dict[str, Any]:
    """Return how the intervals of metrics' values were computed, for ``run.json``, without those that are normal."""
    kinds = {name: of_metric.interval_kind.to_plain() for name, of_metric in values.items()}
    return {name: kind for name, kind in kinds.items() if kind is not None}


def _federation_row(index: int, metric: str, number: float) -> Row:
    return Row(index, metric, client=None, column="", value=number)


class ResultBuilder:
    """Builder of each round's result, which is passed to all sinks."""

    def __init__(
        self,
        metrics: Mapping[str, Metric],
        client_names: Sequence[str],
        class_names: Sequence[str] | None = None,
    ) -> None:
        self._metrics = metrics
        self._client_names = client_names
        # By metric: the names of its columns, None if they are classes, and the names of the classes, which are those
        # of the data or, without these, the metric's.
        self.columns: dict[str, list[str] | None] = {}
        self._class_names: dict[str, Sequence[str] | None] = {}
        for name, metric in metrics.items():
            self.columns[name] = column_names(metric)
            self._class_names[name] = class_names or getattr(metric, "class_names", None)
        self._earlier_numbers: Mapping[str, Values] = {}  # after the round before
        # Names of numbers of the whole federation: all, and those that late results do not repeat.
        self._federation_numbers: set[str] = set()
        self._written_numbers: set[str] = set()

    def rows(
        self,
        index: int,
        values: Mapping[str, Values],
        **of_round: Tensor | None,
    ) -> list[Row]:
        """Return the clients' rows after a round, for the metrics' values and for further numbers ``name=[n]``."""
        metric_rows = self._metric_rows(index, _numbers(values))
        rows = [row for row in metric_rows if row.client is not None]
        for name, vector in of_round.items():
            if vector is not None:
                numbers = by_client(vector.cpu())
                rows += client_rows(index, name, numbers, self._client_names)
        return rows

    def compare_with(self, values: Mapping[str, Values]) -> None:
        """Store the metrics' values before a resumed run's first round, with which new values are compared."""
        self._earlier_numbers = _numbers(values)

    def begin_late_results(self) -> None:
        """From now on, build results of earlier rounds, whose values became known after the last round.

        They do not repeat numbers of the whole federation that the earlier results of these rounds have.
        """
        self._written_numbers = set(self._federation_numbers)
        self._earlier_numbers = {}

    def _metric_rows(
        self,
        index: int,
        numbers: Mapping[str, Values],
        has_columns: bool = True,
    ) -> list[Row]:
        """Return the rows of the metrics' numbers. A number of the whole federation has one row, without a client."""
        rows = []
        for name, values in numbers.items():
            if values.overall.ndim == 0:
                rows.append(_federation_row(index, name, values.overall.item()))
                continue
            intervals = {}
            if values.low is not None and values.high is not None:
                intervals = by_client(torch.stack([values.low, values.high], dim=1))
            rows += client_rows(
                index, name, by_client(values.overall), self._client_names, intervals=intervals
            )
            if has_columns and values.by_class is not None:
                rows += self._column_rows(index, name, values.by_class)
        return rows

    def _column_rows(self, index: int, metric: str, values: Tensor) -> list[Row]:
        rows = []
        columns = self._named_columns(metric, num_columns=values.shape[1])
        for position, (column, class_name) in enumerate(columns.items()):
            rows += client_rows(
                index,
                metric,
                by_client(values[:, position]),
                self._client_names,
                column=column,
                class_name=class_name,
            )
        return rows

    def _named_columns(self, name: str, num_columns: int) -> dict[str, str]:
        """Return ``{key: name}`` of a metric's columns, empty if there is only one class."""
        names_of_columns = self.columns[name]
        if names_of_columns:
            return {column: str(column) for column in names_of_columns}
        if num_columns == 1:
            return {}
        class_numbers = [str(index) for index in range(num_columns)]
        names = self._class_names[name] or class_numbers
        return dict(zip(class_numbers, map(str, names)))

    def _score_rows(
        self,
        index: int,
        scores: Mapping[str, Tensor],
    ) -> list[Row]:
        """Return the rows of the scores of the clients' own models, and of their summary over the clients."""
        rows = []
        for name, score in scores.items():
            numbers = by_client(score.cpu())
            rows += client_rows(index, name, numbers, self._client_names)
        for name, number in score_summary(scores).items():
            rows.append(_federation_row(index, name, number))
        return rows

    def round_result(
        self,
        index: int,
        values: Mapping[str, Values],
        weights: Tensor | None = None,
        losses: Mapping[int, float] = {},
        norms: Mapping[int, float] = {},
        scores: Mapping[str, Tensor] = {},
        has_new_scores: bool = False,
        events: Sequence[Event] = (),
        draws_pictures: bool = False,
    ) -> RoundResult:
        """Return the result of a round. ``weights [n]`` are NaN outside the cohort, and ``scores`` are the latest."""
        all_numbers = _numbers(values)
        numbers = self._without_written_numbers(all_numbers)
        for name, of_metric in all_numbers.items():
            if of_metric.overall.ndim == 0:
                self._federation_numbers.add(name)
        changed = changed_numbers(numbers, self._earlier_numbers)
        self._earlier_numbers = numbers

        metric_rows = self._metric_rows(index, numbers, has_columns=False)
        rows_of_round = self._rows_of_round(index, weights, norms, losses)
        score_rows = self._score_rows(index, scores)
        changes = [*self._metric_rows(index, changed), *rows_of_round]
        if has_new_scores:  # scores of an earlier round are no change
            changes += score_rows
        return RoundResult(
            index,
            table=metric_rows + rows_of_round + score_rows,
            changes=changes,
            events=events,
            interval_kinds=kinds_of_intervals(values),
            pictures=self.pictures(index, values),
            draws_pictures=draws_pictures,
        )

    def _rows_of_round(
        self,
        index: int,
        weights: Tensor | None,
        norms: Mapping[int, float],
        losses: Mapping[int, float],
    ) -> list[Row]:
        weight_by_client = {} if weights is None else by_client(weights.cpu())
        return [
            *client_rows(index, "weight", weight_by_client, self._client_names),
            *client_rows(index, "update_norm", norms, self._client_names),
            *client_rows(index, TRAIN_LOSS, losses, self._client_names),
        ]

    def _without_written_numbers(self, numbers: Mapping[str, Values]) -> dict[str, Values]:
        return {
            name: values
            for name, values in numbers.items()
            if values.overall.ndim > 0 or name not in self._written_numbers
        }

    def pictures(
        self,
        index: int,
        values: Mapping[str, Values],
    ) -> dict[str, Callable[[], Figure]]:
        """Return ``{metric: function that draws its value}`` for the values after a round, if it has any then."""
        return {
            name: partial(draw_metric, self._metrics[name], name, of_metric, index)
            for name, of_metric in values.items()
            if not of_metric.value.isnan().all()
        }


def _numbers(values: Mapping[str, Values]) -> dict[str, Values]:
    """Return metrics' values on the host, and then their diagnostics as ``"<metric>/<diagnostic>"``."""
    numbers = on_cpu(values)
    for name, of_metric in list(numbers.items()):
        for diagnostic, tensor in of_metric.diagnostics.items():
            numbers[f"{name}/{diagnostic}"] = Values(tensor)
    return numbers


def by_client(numbers: Tensor) -> dict[int, Any]:
    """Return the numbers ``[n]``, or rows of numbers ``[n, M]``, by client, without clients that have a NaN."""
    has_numbers = ~numbers.reshape(len(numbers), -1).isnan().any(1)
    clients = has_numbers.nonzero().flatten().tolist()
    return dict(zip(clients, numbers[has_numbers].double().tolist()))


def score_summary(scores: Mapping[str, Tensor]) -> dict[str, float]:
    """Compute mean, minimum and standard deviation over the clients of ``{score: [n]}``. The mean is NaN if a score is.

    Example:
        >>> import torch
        >>> score_summary({"accuracy": torch.tensor([0.5, 1.0])})
        {'client_accuracy/mean': 0.75, 'client_accuracy/min': 0.5, 'client_accuracy/std': 0.25}
    """
    # The deviation of accuracies tells how unevenly clients are served: Li, Sanjabi, Beirami, Smith, "Fair Resource
    # Allocation in Federated Learning", ICLR 2020, definition 1.
    numbers = {}
    for name, client_scores in scores.items():
        has_score = ~client_scores.isnan()
        known_scores = client_scores[has_score].double()
        if len(known_scores) == 0:
            continue
        # The mean is over all clients, so it is NaN if a client has no score.
        numbers[f"client_{name}/mean"] = client_scores.mean().item()
        numbers[f"client_{name}/min"] = known_scores.min().item()
        numbers[f"client_{name}/std"] = known_scores.std(correction=0).item()
    return numbers


def draw_metric(
    metric: Metric,
    name: str,
    values: Values,
    round_index: int,
) -> Figure:
    """Draw a metric's values by its method ``plot``, with bounds and error bars, if any."""
    title = f"{label_text(name)}, round {round_index + 1}"
    options: dict[str, Any] = {}
    if isinstance(metric, ContributionMetric):
        options["intervals"] = values.error_bars
        if values.low is not None:
            title += f", {100 * INTERVAL_LEVEL:.0f} % intervals over seeds"
    if metric.plot_lower_bound is not None and metric.plot_upper_bound is not None:
        options["limits"] = (metric.plot_lower_bound, metric.plot_upper_bound)

    # The method of a metric of torchmetrics, or of the user, may have neither parameter.
    parameters = inspect.signature(metric.plot).parameters
    options_taken = {option: options[option] for option in options if option in parameters}
    figure, axis = metric.plot(values.value, **options_taken)
    axis.set_title(title)
    return figure
