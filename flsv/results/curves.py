"""Functions that convert a round's result to points of curves, and to values that callbacks monitor.

A tag begins with the metric's name, so that tools that group curves by the first part keep a metric's curves together.
If all clients' curves are in one place, the tag ends with the client: ``cssv/client_3_Lyon``,
``cssv/class_3_Dress/client_0_Boston``. If every client has a place of its own (a run in TensorBoard), the tag has no
client: ``cssv``, ``cssv/class_3_Dress``.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import lightning as L
import torch
from torchmetrics import Metric

from flsv.results.round_result import RoundResult, Row, Sink
from flsv.results.rows import column_names
from flsv.results.run_table import OF_A_ROUND
from flsv.scores.class_scores import OWN_SCORES

#: Largest number of curves of one metric per class and client. With more, only pictures and the CSV have the values.
MOST_PER_CLASS = 500


class Monitored(Sink):
    """Sink that fills ``trainer.callback_metrics``, for callbacks that monitor a number."""

    def __init__(self, trainer: L.Trainer, metrics: Iterable[str]) -> None:
        self._trainer, self._metrics = trainer, {*metrics, "weight", *OWN_SCORES}
        self.names: set[str] = set()

    def write(self, result: RoundResult) -> None:
        known = {
            **result.shared,
            **_by_client(row for row in result.table if row.metric in self._metrics),
        }
        now = {name: torch.tensor(value) for name, value in known.items() if value == value}
        for name in self.names - now.keys():
            self._trainer.callback_metrics.pop(name, None)
        self._trainer.callback_metrics.update(now)
        self.names = set(now)

    def write_late(self, results: Sequence[RoundResult]) -> None:
        for result in results:
            numbers = {**result.shared, **_by_client(result.table)}
            for name, number in numbers.items():
                self._trainer.callback_metrics[name] = torch.tensor(number)
            self.names |= numbers.keys()


def _by_client(rows: Iterable[Row]) -> dict[str, float]:
    return {
        f"{tag_of(row.metric)}/client_{row.client}": row.value for row in rows if not row.column
    }


class Point(NamedTuple):
    """One point of a logger's curve: the client's id, the curve's tag without the client, and the value."""

    client: int
    tag: str
    value: float


def points_of(
    result: RoundResult, per_class: Iterable[str], clients: int, class_names: Sequence[str] | None
) -> Iterator[Point]:
    """Yield the points that a round adds to the clients' curves. Metrics ``per_class`` also have curves per class."""
    curves = set(per_class)
    columns = {
        (row.metric, row.column) for row in result.changes if row.column and row.metric in curves
    }
    counts = Counter(metric for metric, _ in columns)
    for row in result.changes:
        if row.column:
            if 0 < counts[row.metric] * clients <= MOST_PER_CLASS:
                tag = f"{row.metric}/{class_part(int(row.column), class_names)}"
                yield Point(row.client, tag, row.value)
            continue
        for what, number in (("", row.value), ("/low", row.low), ("/high", row.high)):
            if number == number:
                yield Point(row.client, f"{tag_of(row.metric)}{what}", number)
    yield from (
        Point(row.client, row.metric, row.value)
        for row in result.table
        if row.metric == "train_loss"
    )


def in_one_place(points: Iterable[Point], client_names: Sequence[str] | None) -> dict[str, float]:
    """Convert points to ``{tag: value}``, where each tag ends with the client, as in ``weight/client_1_Lyon``."""
    return {
        f"{point.tag}/{client_part(point.client, client_names)}": point.value for point in points
    }


def curves_of(metrics: Mapping[str, Metric], wanted: bool) -> list[str]:
    """Return the names of the metrics whose values per class become curves, if ``wanted``."""
    return [name for name, metric in metrics.items() if wanted and column_names(metric) is None]


def names_in_use() -> tuple[str, ...]:
    """Return the names that no metric may have, since the run's table, curves or pictures use them."""
    scores = [tag_of(name) for name in OWN_SCORES]
    return (*OF_A_ROUND, "train_loss", *scores, "data", "how to read")


def tag_of(metric: str) -> str:
    """Return a metric's name for a curve's tag. Scores of the clients' own models get the prefix ``client_``."""
    return f"client_{metric}" if metric in OWN_SCORES else metric


def class_part(column: int, names: Sequence[str] | None) -> str:
    """Return a class's part of a tag: its number, and its name if that differs.

    Example:
        >>> class_part(3, None), class_part(0, ["T-shirt/top"]), class_part(1, ["0", "1"])
        ('class_3', 'class_0_T-shirt_top', 'class_1')
    """
    return _part("class", column, names)


def client_part(client: int, names: Sequence[str] | None) -> str:
    """Return a client's part of a tag: its id, and its name if that differs."""
    return _part("client", client, names)


def _part(kind: str, number: int, names: Sequence[str] | None) -> str:
    name = "" if names is None else str(names[number])
    plain = re.sub(r"[^\w.-]+", "_", name)[:24].strip("_.")
    return f"{kind}_{number}" if plain in ("", str(number)) else f"{kind}_{number}_{plain}"
