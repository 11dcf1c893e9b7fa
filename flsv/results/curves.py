"""Functions that convert a round's result to points of curves, and to values that callbacks monitor.

A tag begins with the metric's name, so that tools that group curves by the first part keep a metric's curves together.
If all clients' curves are in one place, the tag ends with the client: ``cssv/client_3_Lyon``,
``cssv/class_3_Dress/client_0_Boston``. If every client has a place of its own (a run in TensorBoard), the tag has no
client: ``cssv``, ``cssv/class_3_Dress``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import lightning as L
import torch
from torchmetrics import Metric

from flsv.metrics.base import CLIENT_SCORE_PREFIX
from flsv.results.round_result import RoundResult, Row, Sink
from flsv.results.rows import column_names
from flsv.scores import OWN_SCORES

#: Largest number of curves of one metric per class and client. With more, only pictures and the CSV have the values.
MAX_CLASS_CURVES = 500
#: Number of characters of a client's or class's name in a tag.
MAX_NAME_LENGTH = 24


class Monitored(Sink):
    """Sink that fills ``trainer.callback_metrics``, for callbacks that monitor a number."""

    def __init__(
        self,
        trainer: L.Trainer,
        metrics: Iterable[str],
    ) -> None:
        self._trainer = trainer
        self._metrics = {*metrics, "weight", *OWN_SCORES}
        self.names: set[str] = set()

    def write_round(self, result: RoundResult) -> None:
        numbers = {
            name: number
            for name, number in self._numbers(result.table).items()
            if not math.isnan(number)
        }
        names_without_value = self.names - numbers.keys()  # values of earlier rounds
        for name in names_without_value:
            self._trainer.callback_metrics.pop(name, None)
        self.names = set()
        self._store(numbers)

    def write_late_rounds(self, results: Sequence[RoundResult]) -> None:
        for result in results:
            self._store(self._numbers(result.table))

    def _numbers(self, rows: Iterable[Row]) -> dict[str, float]:
        """Return ``{name: number}`` of the federation's numbers, and of the clients' overall values."""
        numbers = {}
        for row in rows:
            if row.client is None:
                numbers[row.metric] = row.value
            elif row.metric in self._metrics and not row.column:
                numbers[f"{tag_of(row.metric)}/client_{row.client}"] = row.value
        return numbers

    def _store(self, numbers: Mapping[str, float]) -> None:
        for name, number in numbers.items():
            self._trainer.callback_metrics[name] = torch.tensor(number)
        self.names |= numbers.keys()


class Point(NamedTuple):
    """One point of a logger's curve: the client's id, the curve's tag without the client, and the value."""

    #: None: the curve is of the whole federation.
    client: int | None
    tag: str
    value: float

    def full_tag(self, client_names: Sequence[str] | None) -> str:
        """Return the tag with the client at its end, as in ``weight/client_1_Lyon``."""
        if self.client is None:
            return self.tag
        return f"{self.tag}/{client_part(self.client, client_names)}"


def curve_points(
    result: RoundResult,
    per_class: Iterable[str],
    num_clients: int,
    class_names: Sequence[str] | None,
) -> Iterator[Point]:
    """Yield the points that a round adds to curves. Metrics ``per_class`` also have curves per class."""
    metrics_with_curves = _metrics_with_class_curves(result, per_class, num_clients)
    for row in result.changes:
        tag = row.metric if row.client is None else tag_of(row.metric)
        if row.column == "":
            yield Point(row.client, tag, row.value)
            if not math.isnan(row.low):
                yield Point(row.client, f"{tag}/low", row.low)
                yield Point(row.client, f"{tag}/high", row.high)
        elif row.metric in metrics_with_curves:
            class_tag = class_part(int(row.column), class_names)
            yield Point(row.client, f"{tag}/{class_tag}", row.value)


def _metrics_with_class_curves(
    result: RoundResult, per_class: Iterable[str], num_clients: int
) -> set[str]:
    """Return the metrics ``per_class`` that have not too many curves."""
    classes_by_metric: dict[str, set[str]] = {metric: set() for metric in per_class}
    for row in result.changes:
        if row.column and row.metric in classes_by_metric:
            classes_by_metric[row.metric].add(row.column)

    metrics_with_curves = set()
    for metric, classes in classes_by_metric.items():
        num_curves = len(classes) * num_clients
        if num_curves <= MAX_CLASS_CURVES:
            metrics_with_curves.add(metric)
    return metrics_with_curves


def curves_of(
    metrics: Mapping[str, Metric],
    has_class_curves: bool,
) -> list[str]:
    """Return the names of the metrics whose values per class become curves, if ``has_class_curves``."""
    if not has_class_curves:
        return []
    return [name for name, metric in metrics.items() if column_names(metric) is None]


def tag_of(metric: str) -> str:
    """Return a metric's name for a curve's tag. Scores of the clients' own models get the prefix ``client_``."""
    if metric in OWN_SCORES:
        return f"{CLIENT_SCORE_PREFIX}{metric}"
    return metric


def class_part(column: int, names: Sequence[str] | None) -> str:
    """Return a class's part of a tag: its number, and its name if that differs.

    Example:
        >>> class_part(3, None), class_part(0, ["T-shirt/top"]), class_part(1, ["0", "1"])
        ('class_3', 'class_0_T-shirt_top', 'class_1')
    """
    return _tag_part("class", column, names)


def client_part(client: int, names: Sequence[str] | None) -> str:
    """Return a client's part of a tag: its id, and its name if that differs."""
    return _tag_part("client", client, names)


def _tag_part(
    kind: str,
    number: int,
    names: Sequence[str] | None,
) -> str:
    numbered_kind = f"{kind}_{number}"
    if names is None:
        return numbered_kind
    allowed_characters = re.sub(r"[^\w.-]+", "_", str(names[number]))
    shortened_name = allowed_characters[:MAX_NAME_LENGTH].strip("_.")
    if shortened_name in ("", str(number)):
        return numbered_kind
    return f"{numbered_kind}_{shortened_name}"
