"""RoundResults: makes the rows of a run's table from the metrics' values after a round."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torchmetrics import Metric

from flsv.metrics import ContributionMetric
from flsv.results.round_result import Event, RoundResult, Row
from flsv.results.run_table import Numbers, changes, round_rows
from flsv.utilities.charts import label_text
from flsv.utilities.host_copies import to_host

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def overall(metric: Metric, value: Tensor) -> Tensor:
    """Reduce a metric's value, ``[n]`` or ``[n, M]``, to one number per client, ``[n]``.

    The metric's method ``per_client`` does so. Other metrics of torchmetrics are averaged over the M columns.
    """
    if isinstance(metric, ContributionMetric):
        return metric.per_client(value)
    return value.mean(-1) if value.ndim == 2 else value


def column_names(metric: Metric) -> list[str] | None:
    """Return the names of a metric's columns. None if they are classes, or it has none."""
    return metric.columns() if isinstance(metric, ContributionMetric) else None


def numbers_of(
    metrics: Mapping[str, Metric], values: Mapping[str, Tensor], class_names: Sequence[str] | None
) -> tuple[list[Numbers], dict[str, float]]:
    """Collect the numbers per client of the metrics' values ``[n]`` or ``[n, M]`` and diagnostics.

    Also return ``{name: number}`` of the values and diagnostics that are a single number.
    """
    found: list[tuple[str, dict[str, str] | None, list[Tensor]]] = []
    for name, value in values.items():
        metric = metrics[name]
        whole = overall(metric, value)
        ends = (
            metric.intervals(value=whole)
            if whole.ndim and isinstance(metric, ContributionMetric)
            else None
        )
        found.append((name, None, [whole, *(ends or ())]))
        if whole.ndim and (columns := _named_columns(metric, value, class_names)):
            found.append((name, columns, [value]))
    found += [(name, None, [value]) for name, value in _diagnostics(metrics, values)]
    here = iter(to_host([tensor for *_, tensors in found for tensor in tensors]))
    numbers: list[Numbers] = []
    shared: dict[str, float] = {}
    for name, names, tensors in found:
        whole, *both = islice(here, len(tensors))
        if whole.ndim:
            ends = (both[0].double(), both[1].double()) if both else None
            numbers.append(Numbers(name, whole.double(), names, ends=ends))
        else:
            shared[name] = whole.item()
    return numbers, shared


def _named_columns(
    metric: Metric, value: Tensor, class_names: Sequence[str] | None
) -> dict[str, str]:
    """Return ``{key: name}`` of a value's columns, empty if there are none, or only one class."""
    own = column_names(metric)
    if value.ndim < 2 or not (own or value.shape[1] > 1):
        return {}
    keys = own or [str(j) for j in range(value.shape[1])]
    names = own or class_names or getattr(metric, "class_names", None) or keys
    return dict(zip(keys, map(str, names)))


def spread(scores: Mapping[str, Tensor]) -> dict[str, float]:
    """Compute mean, minimum and standard deviation over the clients of ``{score: [n]}``. The mean is NaN if a score is.

    Example:
        >>> import torch
        >>> spread({"accuracy": torch.tensor([0.5, 1.0])})
        {'client_accuracy/mean': 0.75, 'client_accuracy/min': 0.5, 'client_accuracy/std': 0.25}
    """
    # The deviation of accuracies tells how unevenly clients are served: Li, Sanjabi, Beirami, Smith, "Fair Resource
    # Allocation in Federated Learning", ICLR 2020, definition 1.
    found: dict[str, float] = {}
    for name, score in scores.items():
        known = score[~score.isnan()].double()
        if len(known):
            # The mean is over all clients, so it is NaN if a client has no score.
            values = {"mean": score.mean(), "min": known.min(), "std": known.std(correction=0)}
            found |= {f"client_{name}/{what}": value.item() for what, value in values.items()}
    return found


def _diagnostics(
    metrics: Mapping[str, Metric], values: Mapping[str, Tensor]
) -> Iterable[tuple[str, Tensor]]:
    """Yield ``("<metric>/<diagnostic>", tensor)`` for all diagnostics of the metrics in ``values``."""
    for name, metric in metrics.items():
        if name not in values:
            continue
        for what, value in (
            metric.diagnostics().items() if isinstance(metric, ContributionMetric) else ()
        ):
            yield f"{name}/{what}", value


class RoundResults:
    """Builder of each round's result, which is passed to all sinks."""

    def __init__(
        self,
        metrics: Mapping[str, Metric],
        client_names: Sequence[str],
        class_names: Sequence[str] | None = None,
    ) -> None:
        self._metrics, self._client_names, self._class_names = metrics, client_names, class_names
        self._before: Sequence[Row] = ()
        self._late: Sequence[Row] = ()
        self._of_rounds: set[str] = set()

    def rows(
        self, index: int, values: Mapping[str, Tensor], **of_round: Tensor | None
    ) -> list[Row]:
        """Return the table's rows after a round, for the metrics' values and for further numbers ``name=[n]``."""
        others = [
            Numbers(name, value.cpu()) for name, value in of_round.items() if value is not None
        ]
        measured, _ = numbers_of(self._metrics, values, self._class_names)
        return round_rows(index, [*measured, *others], self._client_names)

    def _measured(
        self, index: int, values: Mapping[str, Tensor]
    ) -> tuple[list[Row], dict[str, float]]:
        numbers, shared = numbers_of(self._metrics, values, self._class_names)
        return round_rows(index, numbers, self._client_names), shared

    def resume(self, known: Sequence[Row]) -> None:
        """Store the metrics' rows before a resumed run's first round, with which new rows are compared."""
        self._before = known

    def round_result(
        self,
        index: int,
        values: Mapping[str, Tensor],
        weights: Tensor,
        losses: Mapping[int, float] = {},
        norms: Mapping[int, float] = {},
        scores: Mapping[str, Tensor] = {},
        evaluated: bool = False,
        events: Sequence[Event] = (),
        drawn: bool = False,
    ) -> RoundResult:
        """Return the result of a round. ``weights [n]`` are NaN outside the cohort, and ``scores`` are the latest."""
        measured, shared = self._measured(index, values)
        numbers = [
            Numbers("weight", weights.cpu()),
            Numbers("update_norm", [*norms.values()], clients=[*norms]),
        ]
        numbers += [Numbers(name, score.cpu()) for name, score in scores.items()]
        own = round_rows(index, numbers, self._client_names)
        now = [row for row in own if evaluated or row.metric not in scores]
        trained = round_rows(
            index,
            [Numbers("train_loss", [*losses.values()], clients=[*losses])],
            self._client_names,
        )
        new, self._before = changes(measured, self._before), measured
        scored = spread(scores)
        self._of_rounds |= shared.keys()
        return RoundResult(
            index,
            table=measured + own + trained,
            changes=new + now,
            shared=shared | scored,
            shared_changes=shared | (scored if evaluated else {}),
            events=events,
            pictures=self.pictures(index, values),
            drawn=drawn,
        )

    def pictures(self, index: int, values: Mapping[str, Tensor]) -> dict[str, Callable[[], Figure]]:
        """Return ``{metric: function that draws its value}`` for the values after a round."""
        return {
            name: partial(draw_metric, self._metrics[name], name, value, index)
            for name, value in values.items()
        }

    def late(
        self,
        index: int,
        values: Mapping[str, Tensor],
        with_pictures: bool,
        scores: Mapping[str, Tensor] = {},
    ) -> RoundResult:
        """Return the result of an earlier round whose values or scores became known only now, see
        :meth:`round_result`.
        """
        rows, numbers = self._measured(index, values)
        new_rows = changes(rows, self._late)
        self._late = rows

        score_numbers = [Numbers(name, score.cpu()) for name, score in scores.items()]
        score_rows = round_rows(index, score_numbers, self._client_names)
        shared = spread(scores)
        for name, number in numbers.items():
            if name not in self._of_rounds:
                shared[name] = number
        return RoundResult(
            index,
            table=rows + score_rows,
            changes=new_rows + score_rows,
            shared=shared,
            shared_changes=shared,
            pictures=self.pictures(index, values),
            drawn=with_pictures,
        )


def draw_metric(metric: Metric, name: str, value: Tensor, round_index: int) -> Figure:
    """Draw a metric's values by its method ``plot``, with standard errors and bounds, if any."""
    error = metric.diagnostics().get("stderr") if isinstance(metric, ContributionMetric) else None
    bounds = metric.plot_lower_bound, metric.plot_upper_bound
    style: dict[str, Any] = {
        "stderr": None if error is None else error.detach().cpu(),
        "limits": None if None in bounds else bounds,
    }
    known = inspect.signature(
        metric.plot
    ).parameters  # metrics of torchmetrics take neither argument
    figure, axis = metric.plot(value, **{key: each for key, each in style.items() if key in known})
    axis.set_title(f"{label_text(name)}, round {round_index + 1}")
    return figure
