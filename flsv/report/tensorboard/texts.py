"""The Text tab of TensorBoard: the settings, how to read each metric, and what everybody was worth in the end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torchmetrics import Metric

from flsv.metrics import ContributionMetric
from flsv.metrics.guide import what_it_is


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


def results_text(
    labels: Sequence[str],
    counts: Mapping[str, Tensor],
    values: Mapping[str, Tensor],
    errors: Mapping[str, Tensor],
    intervals: Mapping[str, Tensor] | None = None,
) -> str:
    """A row per client.

    Args:
        labels: what the clients are called, n of them.
        counts: column to whole numbers ``[n]``.
        values: column to numbers ``[n]``, NaN where there is none.
        errors: standard errors ``[n]`` of those columns that have them.
        intervals: low and high ends ``[2, n]`` of those that have them, shown in their place.
    """
    columns: dict[str, Sequence[object]] = {"client": labels}
    columns |= {name: [f"{count:.0f}" for count in column.tolist()] for name, column in counts.items()}
    for name, column in values.items():
        cells = ["" if value != value else f"{value:.4g}" for value in column.tolist()]
        if intervals and name in intervals:
            triples = zip(cells, *intervals[name].tolist())
            cells = [f"{cell} [{a:.4g}, {b:.4g}]" if cell and a == a and b == b else cell for cell, a, b in triples]
        elif name in errors:
            pairs = zip(cells, errors[name].tolist())
            cells = [cell if error != error or not cell else f"{cell} ± {error:.2g}" for cell, error in pairs]
        columns[name] = cells
    return markdown_table(columns)


def _plain(value: object) -> str:
    text = " ".join(str(value).split())
    for mark in "\\|*_`<[":
        text = text.replace(mark, "\\" + mark if mark != "<" else "&lt;")
    return text
