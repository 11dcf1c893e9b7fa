"""Conversion of a round's rows to curves of loggers, and to values that callbacks monitor.

A tag begins with the metric's name, so that tools that group curves by the first part keep a metric's curves together.
If all clients' curves are in one place, the tag ends with the client: ``cssv/client_3_Lyon``,
``cssv/class_3_Dress/client_0_Boston``. If every client has a place of its own (a run in TensorBoard), the tag has no
client: ``cssv``, ``cssv/class_3_Dress``.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

import lightning as L
import torch
from torchmetrics import Metric

from flsv._lightning.logged_values import callback_metrics_of
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
        callback_metrics = callback_metrics_of(self._trainer)
        for name in self.names:  # values of earlier rounds
            callback_metrics.pop(name, None)
        self.names = set()
        numbers = self._numbers(result.table)
        self._store({name: number for name, number in numbers.items() if not math.isnan(number)})

    def write_late_rounds(self, results: Sequence[RoundResult]) -> None:
        for result in results:
            self._store(self._numbers(result.table))

    def _numbers(self, rows: Iterable[Row]) -> dict[str, float]:
        """Return ``{name: number}`` of the federation's numbers, and of the clients' overall values."""
        numbers = {}
        for row in rows:
            if row.client is None:
                numbers[row.metric] = row.value
            elif row.metric in self._metrics:
                numbers[f"{tag_of(row.metric)}/client_{row.client}"] = row.value
        return numbers

    def _store(self, numbers: Mapping[str, float]) -> None:
        tensors = torch.tensor(list(numbers.values())).unbind()
        callback_metrics_of(self._trainer).update(zip(numbers, tensors))
        self.names |= numbers.keys()


class Curves:
    """The curves of a run in loggers: their tags, and the points that each round adds.

    Args:
        metrics: the run's metrics by name. Those without named columns also have curves per class.
        client_names: the names of all clients.
        class_names: the names of the classes, if they have any.
    """

    def __init__(
        self,
        metrics: Mapping[str, Metric],
        client_names: Sequence[str],
        class_names: Sequence[str] | None,
    ) -> None:
        self.metrics = tuple(metrics)
        self.client_names = client_names
        self._class_names = class_names
        self._metrics_per_class = [
            name for name, metric in metrics.items() if column_names(metric) is None
        ]

    def points(self, result: RoundResult) -> Iterator[tuple[int | None, str, float]]:
        """Yield ``(client, tag without the client, value)``. The client is None for the federation's numbers."""
        metrics_per_class = self._metrics_with_class_curves(result)
        for row in result.changes:
            tag = row.metric if row.client is None else tag_of(row.metric)
            if row.column == "":
                yield row.client, tag, row.value
                if not math.isnan(row.low):
                    yield row.client, f"{tag}/low_over_seeds", row.low
                    yield row.client, f"{tag}/high_over_seeds", row.high
            elif row.metric in metrics_per_class:
                class_part = _tag_part("class", int(row.column), self._class_names)
                yield row.client, f"{tag}/{class_part}", row.value

    def full_tag(self, tag: str, client: int | None) -> str:
        """Return a tag with the client at its end, as in ``weight/client_1_Lyon``."""
        if client is None:
            return tag
        return f"{tag}/{_tag_part('client', client, self.client_names)}"

    def _metrics_with_class_curves(self, result: RoundResult) -> list[str]:
        """Return the metrics that have values per class in a round, and not too many curves of them."""
        classes_by_metric = defaultdict(set)
        for row in result.changes:
            classes_by_metric[row.metric].add(row.column)
        max_classes = MAX_CLASS_CURVES / len(self.client_names)
        return [
            metric
            for metric in self._metrics_per_class
            if len(classes_by_metric[metric] - {""}) <= max_classes
        ]


def tag_of(metric: str) -> str:
    """Return a metric's name for a curve's tag. Scores of the clients' own models get the prefix ``client_``."""
    if metric in OWN_SCORES:
        return f"{CLIENT_SCORE_PREFIX}{metric}"
    return metric


def _tag_part(
    kind: str,
    number: int,
    names: Sequence[str] | None,
) -> str:
    """Return a class's or client's part of a tag: its number, and its name if that differs.

    Example:
        >>> _tag_part("class", 3, None), _tag_part("class", 0, ["T-shirt/top"]), _tag_part("client", 1, ["0", "1"])
        ('class_3', 'class_0_T-shirt_top', 'client_1')
    """
    numbered_kind = f"{kind}_{number}"
    if names is None:
        return numbered_kind
    allowed_characters = re.sub(r"[^\w.-]+", "_", str(names[number]))
    shortened_name = allowed_characters[:MAX_NAME_LENGTH].strip("_.")
    if shortened_name in ("", str(number)):
        return numbered_kind
    return f"{numbered_kind}_{shortened_name}"
