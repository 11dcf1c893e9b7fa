"""Rows of a run's table, and the numbers of no single client, from what metrics and server know after a round."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torchmetrics import Metric

from flsv.metrics import ContributionMetric
from flsv.results.round_result import Event, RoundResult, Row
from flsv.results.run_table import Numbers, changes, round_rows
from flsv.utilities.charts import label_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def overall(metric: Metric, value: Tensor) -> Tensor:
    """Return one number per client ``[n]``: the metric's own summary, or the mean over classes."""
    if isinstance(metric, ContributionMetric):
        return metric.per_client(value)
    return value.mean(-1) if value.ndim == 2 else value


def column_names(metric: Metric) -> list[str] | None:
    """Return the names of the columns of a metric's values where they are no classes."""
    return metric.columns() if isinstance(metric, ContributionMetric) else None


def numbers_of(
    metrics: Mapping[str, Metric], values: Mapping[str, Tensor], class_names: Sequence[str] | None
) -> Iterator[Numbers]:
    """Yield all that the metrics say of clients: overall values with their intervals, values per class (or whatever
    the columns are), and diagnostics that have a number for each client.

    Args:
        metrics: the metrics, by name.
        values: name to ``[n]`` or ``[n, M]``.
        class_names: names of the classes, or None.
    """
    for name, value in values.items():
        metric = metrics[name]
        whole = overall(metric, value)
        if whole.ndim == 0:
            continue
        ends = metric.intervals(value=whole) if isinstance(metric, ContributionMetric) else None
        yield Numbers(name, _plain(whole), ends=None if ends is None else [_plain(end) for end in ends])
        if columns := _named_columns(metric, value, class_names):
            yield Numbers(name, _plain(value), columns)
    for name, value in _diagnostics(metrics):
        if value.ndim:
            yield Numbers(name, _plain(value))


def _named_columns(metric: Metric, value: Tensor, class_names: Sequence[str] | None) -> dict[str, str]:
    """Map the keys of a value's columns to their names; empty where there are none, or one class, which is all."""
    own = column_names(metric)
    if value.ndim < 2 or not (own or value.shape[1] > 1):
        return {}
    keys = own or [str(j) for j in range(value.shape[1])]
    names = own or class_names or getattr(metric, "class_names", None) or keys
    return dict(zip(keys, map(str, names)))


def shared_numbers(metrics: Mapping[str, Metric], values: Mapping[str, Tensor]) -> dict[str, float]:
    """Return the metrics' numbers that belong to no single client, by name."""
    wholes = ((name, overall(metrics[name], value)) for name, value in values.items())
    return {name: value.item() for name, value in (*wholes, *_diagnostics(metrics)) if value.ndim == 0}


def spread(scores: Mapping[str, Tensor]) -> dict[str, float]:
    """Compute mean, minimum and standard deviation over clients of their own models' scores ``[n]``, by name. The
    standard deviation of accuracies is how unevenly clients are served: Li, Sanjabi, Beirami, Smith, "Fair Resource
    Allocation in Federated Learning", ICLR 2020, definition 1.

    Example:
        >>> import torch
        >>> spread({"accuracy": torch.tensor([0.5, 1.0])})
        {'client_accuracy/mean': 0.75, 'client_accuracy/min': 0.5, 'client_accuracy/std': 0.25}
    """
    found: dict[str, float] = {}
    for name, score in scores.items():
        known = score[~score.isnan()].double()
        if len(known):
            # NaN where somebody has no score: it is a mean of all.
            values = {"mean": score.mean(), "min": known.min(), "std": known.std(correction=0)}
            found |= {f"client_{name}/{what}": value.item() for what, value in values.items()}
    return found


def _diagnostics(metrics: Mapping[str, Metric]) -> Iterable[tuple[str, Tensor]]:
    for name, metric in metrics.items():
        for what, value in metric.diagnostics().items() if isinstance(metric, ContributionMetric) else ():
            yield f"{name}/{what}", value


def _plain(value: Tensor) -> Tensor:
    return value.detach().cpu().double()


class RoundResults:
    """Maker of each round's result, once for all sinks.

    Args:
        metrics: the metrics, by name.
        client_names: names of the clients.
        class_names: names of the classes, or None.
    """

    def __init__(
        self, metrics: Mapping[str, Metric], client_names: Sequence[str], class_names: Sequence[str] | None = None
    ) -> None:
        self._metrics, self._client_names, self._class_names = metrics, client_names, class_names
        self._before: Sequence[Row] = ()
        self._late: Sequence[Row] = ()

    def rows(self, index: int, values: Mapping[str, Tensor], **of_round: Tensor | None) -> list[Row]:
        """Make the rows of all that is known between two rounds.

        Args:
            index: the last round's number, from 0.
            values: the metrics' values, by name.
            of_round: what else there is of every client ``[n]``, such as the weights, by name.
        """
        others = [Numbers(name, value.cpu()) for name, value in of_round.items() if value is not None]
        measured = numbers_of(self._metrics, values, self._class_names)
        return round_rows(index, [*measured, *others], self._client_names)

    def resume(self, known: Sequence[Row]) -> None:
        """Count as changes only what differs from these rows, which are written already."""
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
        """Make the result of a round.

        Args:
            index: the round's number, from 0.
            values: the metrics' values by name, ``[n]`` or ``[n, M]``.
            weights: ``[n]`` of the aggregation, NaN outside the cohort.
            losses: client id to its training loss.
            norms: client id to the norm of its update.
            scores: ``[n]`` of the clients' own models by name, as they were last evaluated.
            evaluated: whether that was in this round.
            events: the run's events so far.
            drawn: whether pictures are wanted.
        """
        measured = self.rows(index, values)
        numbers = [Numbers("weight", weights.cpu()), Numbers("update_norm", [*norms.values()], clients=[*norms])]
        numbers += [Numbers(name, score.cpu()) for name, score in scores.items()]
        own = round_rows(index, numbers, self._client_names)
        now = [row for row in own if evaluated or row.metric not in scores]
        trained = round_rows(index, [Numbers("train_loss", [*losses.values()], clients=[*losses])], self._client_names)
        new, self._before = changes(measured, self._before), measured
        shared, scored = shared_numbers(self._metrics, values), spread(scores)
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
        """Return what draws these values after a round, by the metric's name."""
        return {name: partial(draw_metric, self._metrics[name], name, value, index) for name, value in values.items()}

    def late(self, index: int, values: Mapping[str, Tensor], drawn: bool) -> RoundResult:
        """Make the rows of an earlier round from what is known by now; see :meth:`round_result`.

        Args:
            index: the round's number, from 0.
            values: the metrics' values after it, by name; rounds are told in their order.
            drawn: whether pictures are wanted.
        """
        rows = self.rows(index, values)
        new, self._late = changes(rows, self._late), rows
        shared = shared_numbers({name: self._metrics[name] for name in values}, values)
        return RoundResult(index, rows, new, shared, shared, pictures=self.pictures(index, values), drawn=drawn)


def draw_metric(metric: Metric, name: str, value: Tensor, round_index: int) -> Figure:
    """Draw a metric's values by its own ``plot``, with their standard errors and within its bounds, if it has any.

    Args:
        metric: draws itself.
        name: its name in the run.
        value: the metric's value.
        round_index: from 0; the title counts from 1.
    """
    error = metric.diagnostics().get("stderr") if isinstance(metric, ContributionMetric) else None
    bounds = metric.plot_lower_bound, metric.plot_upper_bound
    style: dict[str, Any] = {
        "stderr": None if error is None else error.detach().cpu(),
        "limits": None if None in bounds else bounds,
    }
    known = inspect.signature(metric.plot).parameters  # of a metric of torchmetrics' own, neither
    figure, axis = metric.plot(value, **{key: each for key, each in style.items() if key in known})
    axis.set_title(f"{label_text(name)}, round {round_index + 1}")
    return figure
