"""ResultBuilder: creates the rows of a run's table from the metrics' values after a round."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torchmetrics import Metric

from flsv.metrics import ContributionMetric
from flsv.results.round_result import TRAIN_LOSS, Event, RoundResult, Row
from flsv.utilities.csv_files import NAN
from flsv.utilities.display import INTERVAL_LEVEL, label_text
from flsv.utilities.host_copies import to_host

if TYPE_CHECKING:
    from matplotlib.figure import Figure


#: A metric's or diagnostic's name, and the part of its values that a tensor holds.
TensorKey = tuple[str, str]
#: One number for each client, `[n]`, or for all of them, `[]`.
OVERALL = "overall"
#: The ends of the clients' intervals, `[n, 2]`.
ENDS = "ends"
#: A number for each client and column, `[n, M]`.
COLUMNS = "columns"
#: A function of metrics' names and of a text that says what is done with them. It returns a context in which an error
#: of a metric does not end the run.
KeepingRun = Callable[[Sequence[str], str], AbstractContextManager[None]]


def overall(metric: Metric, value: Tensor) -> Tensor:
    """Reduce a metric's value, ``[n]`` or ``[n, M]``, to one number per client, ``[n]``.

    The metric's method ``per_client`` does so. Other metrics of torchmetrics are averaged over the M columns.
    """
    if isinstance(metric, ContributionMetric):
        return metric.per_client(value)
    if value.ndim == 2:
        return value.mean(-1)
    return value


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
    tensors: Mapping[TensorKey, Tensor],
    earlier_tensors: Mapping[TensorKey, Tensor],
) -> dict[TensorKey, Tensor]:
    """Return the ``tensors`` with NaN for each client's number that is the same in ``earlier_tensors``.

    A number with another interval than before has changed. Numbers of the whole federation are always new.
    """
    changed_tensors = {}
    for (name, part), tensor in tensors.items():
        earlier_tensor = earlier_tensors.get((name, part))
        is_whole = part == ENDS or tensor.ndim == 0
        if is_whole or earlier_tensor is None:
            changed_tensors[name, part] = tensor
            continue
        is_changed = tensor != earlier_tensor
        if part == OVERALL and (name, ENDS) in tensors:
            bounds = tensors[name, ENDS]
            is_changed |= _have_other_ends(bounds, earlier_tensors.get((name, ENDS)))
        changed_tensors[name, part] = tensor.where(is_changed, NAN)
    return changed_tensors


def _have_other_ends(bounds: Tensor, earlier_bounds: Tensor | None) -> Tensor:
    """Return which clients have an interval, and another than before. Intervals are ``[n, 2]``."""
    if earlier_bounds is None:
        earlier_bounds = torch.full_like(bounds, NAN)
    has_interval = ~bounds.isnan().any(1)
    has_other_end = (bounds != earlier_bounds).any(1)
    return has_interval & has_other_end


def _names_of_federation_numbers(tensors: Mapping[TensorKey, Tensor]) -> set[str]:
    return {name for (name, _part), tensor in tensors.items() if tensor.ndim == 0}


def _federation_row(index: int, metric: str, number: float) -> Row:
    return Row(index, metric, client=None, column="", value=number)


class ResultBuilder:
    """Builder of each round's result, which is passed to all sinks."""

    def __init__(
        self,
        metrics: Mapping[str, Metric],
        client_names: Sequence[str],
        class_names: Sequence[str] | None = None,
        missing: Collection[str] = (),
        keeping_run: KeepingRun = lambda names, action: nullcontext(),  # errors are raised
    ) -> None:
        self._metrics = metrics
        self._missing = missing
        self._keeping_run = keeping_run
        self._client_names = client_names
        # By metric: the names of its columns, None if they are classes, and the names of the classes, which are those
        # of the data or, without these, the metric's.
        self.columns: dict[str, list[str] | None] = {}
        self._class_names: dict[str, Sequence[str] | None] = {}
        for name, metric in metrics.items():
            self.columns[name] = column_names(metric)
            self._class_names[name] = class_names or getattr(metric, "class_names", None)
        self._earlier_tensors: Mapping[TensorKey, Tensor] = {}  # after the round before
        # Names of numbers of the whole federation: all, and those that late results do not repeat.
        self._federation_numbers: set[str] = set()
        self._written_numbers: set[str] = set()

    def rows(
        self,
        index: int,
        values: Mapping[str, Tensor],
        **of_round: Tensor | None,
    ) -> list[Row]:
        """Return the clients' rows after a round, for the metrics' values and for further numbers ``name=[n]``."""
        metric_rows = self._metric_rows(index, self._metric_tensors(values))
        rows = [row for row in metric_rows if row.client is not None]
        for name, vector in of_round.items():
            if vector is not None:
                numbers = by_client(vector.cpu())
                rows += client_rows(index, name, numbers, self._client_names)
        return rows

    def compare_with(self, values: Mapping[str, Tensor]) -> None:
        """Store the metrics' values before a resumed run's first round, with which new values are compared."""
        self._earlier_tensors = self._metric_tensors(values)

    def begin_late_results(self) -> None:
        """From now on, build results of earlier rounds, whose values became known after the last round.

        They do not repeat numbers of the whole federation that the earlier results of these rounds have.
        """
        self._written_numbers = set(self._federation_numbers)
        self._earlier_tensors = {}

    def _metric_tensors(self, values: Mapping[str, Tensor]) -> dict[TensorKey, Tensor]:
        """Return the metrics' values ``[n]`` or ``[n, M]`` and diagnostics, on the host."""
        tensors: dict[TensorKey, Tensor] = {}
        for tensors_of in (self._values_of, self._diagnostics_of):
            for name, value in values.items():
                with self._keeping_run([name], "making its rows"):
                    tensors |= tensors_of(name, value)
        # All tensors are copied to the host at once, since each copy waits for the device.
        host_tensors = dict(zip(tensors, to_host(tensors.values())))
        # Copies, because metrics change their states in place.
        return {key: tensor.to(torch.float64, copy=True) for key, tensor in host_tensors.items()}

    def _metric_rows(
        self,
        index: int,
        tensors: Mapping[TensorKey, Tensor],
    ) -> list[Row]:
        """Return the rows of the metrics' numbers. A number of the whole federation has one row, without a client."""
        rows = []
        for (name, part), tensor in tensors.items():
            if tensor.ndim == 0:
                rows.append(_federation_row(index, name, tensor.item()))
            elif part == OVERALL:
                interval_ends = tensors.get((name, ENDS))
                intervals = {}
                if interval_ends is not None:
                    intervals = by_client(interval_ends)
                rows += client_rows(
                    index, name, by_client(tensor), self._client_names, intervals=intervals
                )
            elif part == COLUMNS:
                rows += self._column_rows(index, name, tensor)
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

    def _values_of(self, name: str, value: Tensor) -> dict[TensorKey, Tensor]:
        """Return a metric's overall values, the ends of their intervals, and its values by column, as far as it has
        any."""
        if name in self._missing:  # the metric's intervals and columns are not known
            client_values = value if value.ndim == 1 else value.mean(-1)
            return {(name, OVERALL): client_values}
        metric = self._metrics[name]
        client_values = overall(metric, value)
        tensors = {(name, OVERALL): client_values}
        if client_values.ndim == 0:
            return tensors
        if isinstance(metric, ContributionMetric):
            intervals = metric.intervals(value=client_values)
            if intervals is not None:
                tensors[name, ENDS] = torch.stack(intervals, dim=1)
        if value.ndim == 2:
            tensors[name, COLUMNS] = value
        return tensors

    def _diagnostics_of(self, name: str, value: Tensor) -> dict[TensorKey, Tensor]:
        """Return a metric's diagnostics, under ``"<metric>/<diagnostic>"``."""
        metric = self._metrics[name]
        if name in self._missing or not isinstance(metric, ContributionMetric):
            return {}
        diagnostics = metric.diagnostics().items()
        return {(f"{name}/{diagnostic}", OVERALL): tensor for diagnostic, tensor in diagnostics}

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
        values: Mapping[str, Tensor],
        weights: Tensor | None = None,
        losses: Mapping[int, float] = {},
        norms: Mapping[int, float] = {},
        scores: Mapping[str, Tensor] = {},
        has_new_scores: bool = False,
        events: Sequence[Event] = (),
        draws_pictures: bool = False,
    ) -> RoundResult:
        """Return the result of a round. ``weights [n]`` are NaN outside the cohort, and ``scores`` are the latest."""
        all_tensors = self._metric_tensors(values)
        tensors = self._without_written_numbers(all_tensors)
        self._federation_numbers |= _names_of_federation_numbers(all_tensors)
        changed_tensors = changed_numbers(tensors, self._earlier_tensors)
        self._earlier_tensors = tensors

        tensors_without_columns = {
            (name, part): tensor for (name, part), tensor in tensors.items() if part != COLUMNS
        }
        metric_rows = self._metric_rows(index, tensors_without_columns)
        rows_of_round = self._rows_of_round(index, weights, norms, losses)
        score_rows = self._score_rows(index, scores)
        changes = [*self._metric_rows(index, changed_tensors), *rows_of_round]
        if has_new_scores:  # scores of an earlier round are no change
            changes += score_rows
        return RoundResult(
            index,
            table=metric_rows + rows_of_round + score_rows,
            changes=changes,
            events=events,
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

    def _without_written_numbers(
        self, tensors: Mapping[TensorKey, Tensor]
    ) -> dict[TensorKey, Tensor]:
        return {
            (name, part): tensor
            for (name, part), tensor in tensors.items()
            if tensor.ndim > 0 or name not in self._written_numbers
        }

    def pictures(
        self,
        index: int,
        values: Mapping[str, Tensor],
    ) -> dict[str, Callable[[], Figure]]:
        """Return ``{metric: function that draws its value}`` for the values after a round, if it has any then."""
        return {
            name: partial(draw_metric, self._metrics[name], name, value, index)
            for name, value in values.items()
            if not value.isnan().all()
        }


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
    value: Tensor,
    round_index: int,
) -> Figure:
    """Draw a metric's values by its method ``plot``, with bounds and error bars, if any."""
    title = f"{label_text(name)}, round {round_index + 1}"
    options: dict[str, Any] = {}
    if isinstance(metric, ContributionMetric):
        options["intervals"] = metric.error_bars(value)
        if value.ndim == 1 and metric.intervals(value=value) is not None:
            title += f", {100 * INTERVAL_LEVEL:.0f} % intervals over seeds"
    if metric.plot_lower_bound is not None and metric.plot_upper_bound is not None:
        options["limits"] = (metric.plot_lower_bound, metric.plot_upper_bound)

    # The method of a metric of torchmetrics, or of the user, may have neither parameter.
    parameters = inspect.signature(metric.plot).parameters
    options_taken = {option: options[option] for option in options if option in parameters}
    figure, axis = metric.plot(value, **options_taken)
    axis.set_title(title)
    return figure
