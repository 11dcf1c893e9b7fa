"""The Text tab of TensorBoard: the settings, how to read each metric, and what everybody was worth in the end."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torchmetrics import Metric

from flsv.csv_files import NAN
from flsv.metrics import ContributionMetric
from flsv.metrics.guide import what_it_is
from flsv.report.run_table import RunTable


def markdown_table(columns: Mapping[str, Sequence[object]]) -> str:
    """Columns as a table; whatever they hold is shown as it is.

    Example:
        >>> print(markdown_table({"client": ["a|b"], "weight": [0.5]}))
        | client | weight |
        |---|---|
        | a\\|b | 0.5 |
    """
    lines = ["| " + " | ".join(map(_plain, columns)) + " |", "|" + "---|" * len(columns)]
    lines += ["| " + " | ".join(map(_plain, row)) + " |" for row in zip(*columns.values())]
    return "\n".join(lines)


def settings_text(settings: Mapping[str, Any]) -> str:
    """The run's settings, by name."""
    return markdown_table({"setting": list(settings), "value": list(settings.values())})


def guide_text(name: str, metric: Metric) -> str:
    """How to read a metric."""
    rows = {"what it is": what_it_is(metric)}
    rows |= metric.guide().lines() if isinstance(metric, ContributionMetric) else {}
    rows["settings"] = repr(metric)
    return markdown_table({name: list(rows), " ": list(rows.values())})


def results_text(table: RunTable, metrics: Iterable[str], labels: Sequence[str]) -> str:
    """A row per client.

    Args:
        table: of the last round: the metrics' rows, and ``samples``, ``rounds``, ``weight`` and ``accuracy``.
        metrics: names of those that are columns.
        labels: what the clients are called, n of them.
    """
    columns: dict[str, Sequence[object]] = {"client": labels}
    for name in ("samples", "rounds"):
        columns[name] = [f"{count:.0f}" for count in table.last(name, len(labels))]
    for name in metrics:
        ends = (table.last(name, len(labels), what=what) for what in ("value", "low", "high"))
        columns[name] = [*map(cell, *ends, table.last(f"{name}/stderr", len(labels)))]
    for name, title in (("weight", "weight"), ("accuracy", "own accuracy")):
        if name in table.metrics:
            columns[title] = [*map(cell, table.last(name, len(labels)))]
    return markdown_table(columns)


def cell(value: float, low: float = NAN, high: float = NAN, error: float = NAN) -> str:
    """A value with its interval, or with its standard error; NaN is unknown.

    Example:
        >>> cell(0.5), cell(0.5, 0.25, 0.75), cell(0.5, error=0.0625), cell(NAN)
        ('0.5', '0.5 [0.25, 0.75]', '0.5 ± 0.062', '')
    """
    if value != value:
        return ""
    if low == low:
        return f"{value:.4g} [{low:.4g}, {high:.4g}]"
    return f"{value:.4g}" + (f" ± {error:.2g}" if error == error else "")


def _plain(value: object) -> str:
    text = " ".join(str(value).split())
    for mark in "\\|*_`<[":
        text = text.replace(mark, "\\" + mark if mark != "<" else "&lt;")
    return text
