"""What a run's record says of the model that its metrics share out, a line each below the table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flsv.report.table import NONE


def lines_of(record: Mapping[str, Any]) -> list[str]:
    """By metric: the performance at the start and at the end, what the values sum to, and whether it is anything.

    Example:
        >>> told = {"by": "accuracy", "start": 0.1, "end": 0.1, "sum": 0.02, "told_apart": False}
        >>> lines_of({"paid_in": {"sv": told}})
        ['accuracy 0.1 -> 0.1, the values of sv sum to 0.02: not told apart from a constant prediction']
    """
    lines = []
    for metric, told in record.get("paid_in", {}).items():
        start, end, whole = (NONE if told[x] is None else f"{told[x]:.4g}" for x in ("start", "end", "sum"))
        line = f"{told['by']} {start} -> {end}" + (f", the values of {metric} sum to {whole}" if metric else "")
        lines.append(line + (": not told apart from a constant prediction" if told["told_apart"] is False else ""))
    if "not_known" in record:
        lines.append(f"whether the model has learned anything is not known: {record['not_known']}")
    return lines
