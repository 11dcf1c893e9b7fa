"""ResultBuilder: makes the rows of a run's table from the metrics' values after a round."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torchmetrics import Metric

from flsv.metrics import ContributionMetric
from flsv.results.round_result import Event, RoundResult, Row
from flsv.results.run_table import Numbers, changed_rows, round_rows
from flsv.utilities.display import INTERVAL_LEVEL, label_text
from flsv.utilities.host_copies import to_host

if TYPE_CHECKING:
    from matplotlib.figure import Figure


#: A function of metrics' names and of what is done with them. Within its context a metric's error does not end the run.
KeepingRun = Callable[[Sequence[str], str], AbstractContextManager[None]]


def raising(names: Sequence[str], action: str) -> AbstractContextManager[None]:
    """Return a context in which errors are raised."""
    return nullcontext()


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


def numbers_of(
    metrics: Mapping[str, Metric],
    values: Mapping[str, Tensor],
    class_names: Sequence[str] | None,
    missing: Collection[str] = (),
    keeping_run: KeepingRun = raising,
) -> tuple[list[Numbers], dict[str, float]]:
    """Collect the numbers per client of the metrics' values ``[n]`` or ``[n, M]`` and diagnostics.

    Of metrics that are ``missing`` there are only the values. Also return ``{name: number}`` of the values and
    diagnostics that are a single number.
    """
    device_numbers: list[Numbers] = []
    diagnostics: list[Numbers] = []
    for name, value in values.items():
        if name in missing:
            device_numbers.append(Numbers(name, value if value.ndim == 1 else value.mean(-1)))
            continue
        with keeping_run([name], "making its rows"):
            device_numbers += _numbers_of_metric(name, metrics[name], value, class_names)
            diagnostics += _diagnostics(name, metrics[name])
    device_numbers += diagnostics

    # One copy for all, since each copy would wait for the device.
    tensors: list[Tensor] = []
    for of_device in device_numbers:
        tensors += [of_device.values, *of_device.bounds]
    host_tensors = iter(to_host(tensors))
    numbers: list[Numbers] = []
    shared: dict[str, float] = {}
    for of_device in device_numbers:
        value = next(host_tensors)
        bounds = [end.double() for end in islice(host_tensors, len(of_device.bounds))]
        if value.ndim == 0:
            shared[of_device.metric] = value.item()
        else:
            numbers.append(replace(of_device, values=value.double(), bounds=bounds))
    return numbers, shared


def _numbers_of_metric(
    name: str,
    metric: Metric,
    value: Tensor,
    class_names: Sequence[str] | None,
) -> list[Numbers]:
    """Return a metric's values per client and column, with intervals."""
    client_values = overall(metric, value)
    if client_values.ndim == 0:
        return [Numbers(name, client_values)]

    bounds = None
    if isinstance(metric, ContributionMetric):
        bounds = metric.intervals(value=client_values)
    numbers = [Numbers(name, client_values, bounds=bounds or ())]
    columns = _named_columns(metric, value, class_names)
    if columns:
        numbers.append(Numbers(name, value, columns))
    return numbers


def _named_columns(
    metric: Metric,
    value: Tensor,
    class_names: Sequence[str] | None,
) -> dict[str, str]:
    """Return ``{key: name}`` of a value's columns, empty if there are none, or only one class."""
    if value.ndim < 2:
        return {}
    names_of_columns = column_names(metric)
    if names_of_columns:
        return {name: str(name) for name in names_of_columns}
    num_classes = value.shape[1]
    if num_classes == 1:
        return {}
    class_numbers = [str(index) for index in range(num_classes)]
    # Class names of the data, else of the metric, else numbers.
    names = class_names or getattr(metric, "class_names", None) or class_numbers
    return dict(zip(class_numbers, map(str, names)))


def score_summary(scores: Mapping[str, Tensor]) -> dict[str, float]:
    """Compute mean, minimum and standard deviation over the clients of ``{score: [n]}``. The mean is NaN if a score is.

    Example:
        >>> import torch
        >>> score_summary({"accuracy": torch.tensor([0.5, 1.0])})
        {'client_accuracy/mean': 0.75, 'client_accuracy/min': 0.5, 'client_accuracy/std': 0.25}
    """
    # The deviation of accuracies tells how unevenly clients are served: Li, Sanjabi, Beirami, Smith, "Fair Resource
    # Allocation in Federated Learning", ICLR 2020, definition 1.
    numbers: dict[str, float] = {}
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


def _diagnostics(name: str, metric: Metric) -> list[Numbers]:
    """Return a metric's diagnostics, under ``"<metric>/<diagnostic>"``."""
    if not isinstance(metric, ContributionMetric):
        return []
    diagnostics = metric.diagnostics().items()
    return [Numbers(f"{name}/{diagnostic}", value) for diagnostic, value in diagnostics]


class ResultBuilder:
    """Builder of each round's result, which is passed to all sinks."""

    def __init__(
        self,
        metrics: Mapping[str, Metric],
        client_names: Sequence[str],
        class_names: Sequence[str] | None = None,
        missing: Collection[str] = (),
        keeping_run: KeepingRun = raising,
    ) -> None:
        self._metrics = metrics
        self._missing = missing
        self._keeping_run = keeping_run
        self._client_names = client_names
        self._class_names = class_names
        self._earlier_rows: Sequence[Row] = ()
        self._late_rows: Sequence[Row] = ()
        self._names_of_rounds: set[str] = set()

    def rows(
        self,
        index: int,
        values: Mapping[str, Tensor],
        **of_round: Tensor | None,
    ) -> list[Row]:
        """Return the table's rows after a round, for the metrics' values and for further numbers ``name=[n]``."""
        metric_rows, _ = self._measured(index, values)
        return metric_rows + self._vector_rows(index, of_round)

    def _measured(
        self, index: int, values: Mapping[str, Tensor]
    ) -> tuple[list[Row], dict[str, float]]:
        numbers, shared = numbers_of(
            self._metrics,
            values,
            self._class_names,
            missing=self._missing,
            keeping_run=self._keeping_run,
        )
        return round_rows(index, numbers, self._client_names), shared

    def _vector_rows(self, index: int, vectors: Mapping[str, Tensor | None]) -> list[Row]:
        """Return the rows of one number per client, ``{name: [n]}``."""
        numbers = [
            Numbers(name, vector.cpu()) for name, vector in vectors.items() if vector is not None
        ]
        return round_rows(index, numbers, self._client_names)

    def _cohort_rows(
        self, index: int, name: str, number_by_client: Mapping[int, float]
    ) -> list[Row]:
        numbers = Numbers(name, [*number_by_client.values()], clients=[*number_by_client])
        return round_rows(index, [numbers], self._client_names)

    def resume(self, rows: Sequence[Row]) -> None:
        """Store the metrics' rows before a resumed run's first round, with which new rows are compared."""
        self._earlier_rows = rows

    def round_result(
        self,
        index: int,
        values: Mapping[str, Tensor],
        weights: Tensor,
        losses: Mapping[int, float] = {},
        norms: Mapping[int, float] = {},
        scores: Mapping[str, Tensor] = {},
        has_new_scores: bool = False,
        events: Sequence[Event] = (),
        draws_pictures: bool = False,
    ) -> RoundResult:
        """Return the result of a round. ``weights [n]`` are NaN outside the cohort, and ``scores`` are the latest."""
        metric_rows, shared = self._measured(index, values)
        new_rows = changed_rows(metric_rows, self._earlier_rows)
        self._earlier_rows = metric_rows
        self._names_of_rounds |= shared.keys()

        rows_of_round = self._vector_rows(index, {"weight": weights})
        rows_of_round += self._cohort_rows(index, "update_norm", norms)
        score_rows = self._vector_rows(index, scores)
        loss_rows = self._cohort_rows(index, "train_loss", losses)

        new_rows += rows_of_round
        score_numbers = score_summary(scores)
        shared_changes = dict(shared)
        if has_new_scores:  # those of an earlier round are no change
            new_rows += score_rows
            shared_changes |= score_numbers
        return RoundResult(
            index,
            table=metric_rows + rows_of_round + score_rows + loss_rows,
            changes=new_rows,
            shared=shared | score_numbers,
            shared_changes=shared_changes,
            events=events,
            pictures=self.pictures(index, values),
            draws_pictures=draws_pictures,
        )

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

    def late_result(
        self,
        index: int,
        values: Mapping[str, Tensor],
        draws_pictures: bool,
        scores: Mapping[str, Tensor] = {},
    ) -> RoundResult:
        """Return the result of an earlier round whose values or scores became known only now, see
        :meth:`round_result`.
        """
        metric_rows, numbers = self._measured(index, values)
        new_rows = changed_rows(metric_rows, self._late_rows)
        self._late_rows = metric_rows

        score_rows = self._vector_rows(index, scores)

        # Numbers of the whole federation. Those that earlier rounds have written are not written again.
        shared_numbers = score_summary(scores)
        for name, number in numbers.items():
            if name not in self._names_of_rounds:
                shared_numbers[name] = number
        return RoundResult(
            index,
            table=metric_rows + score_rows,
            changes=new_rows + score_rows,
            shared=shared_numbers,
            shared_changes=shared_numbers,
            pictures=self.pictures(index, values),
            draws_pictures=draws_pictures,
        )


def draw_metric(
    metric: Metric,
    name: str,
    value: Tensor,
    round_index: int,
) -> Figure:
    """Draw a metric's values by its method ``plot``, with bounds, and intervals or standard errors, if any."""
    stderr = None
    intervals = None
    if isinstance(metric, ContributionMetric):
        stderr = metric.diagnostics().get("stderr")
        if value.ndim == 1:
            intervals = metric.intervals(value=value)
    if stderr is not None:
        stderr = stderr.detach().cpu()
    limits = None
    if metric.plot_lower_bound is not None and metric.plot_upper_bound is not None:
        limits = (metric.plot_lower_bound, metric.plot_upper_bound)

    # Metrics of torchmetrics take neither argument.
    parameters = inspect.signature(metric.plot).parameters
    options: dict[str, Any] = {}
    if "stderr" in parameters and intervals is None:
        options["stderr"] = stderr
    if "limits" in parameters:
        options["limits"] = limits
    figure, axis = metric.plot(value, **options)
    title = f"{label_text(name)}, round {round_index + 1}"
    if intervals is not None:
        _draw_intervals(axis, value, intervals)
        title += f", {INTERVAL_LEVEL:.0%} intervals"
    axis.set_title(title)
    return figure


def _draw_intervals(axis: Any, value: Tensor, intervals: tuple[Tensor, Tensor]) -> None:
    """Add each client's interval to the bars of values ``[n]``."""
    centers = value.cpu().double()
    low, high = (bound.cpu().double() for bound in intervals)
    # Axes that hold a NaN have no size.
    is_finite = centers.isfinite() & low.isfinite() & high.isfinite()
    clients = is_finite.nonzero().flatten()
    lengths_below = (centers - low)[clients]
    lengths_above = (high - centers)[clients]
    axis.errorbar(
        clients.numpy(),
        centers[clients].numpy(),
        yerr=[lengths_below.numpy(), lengths_above.numpy()],
        fmt="none",  # no markers: the bars show the values
        ecolor="0.25",
        capsize=3,
    )
