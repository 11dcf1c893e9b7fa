"""Paired comparisons of a table's rows, and their Markdown.

Runs of one seed have the same data, clients and initial weights in every row, so that rows are compared by their
differences seed by seed. A row is called better or worse only where the interval of the mean difference excludes 0. The
other row is the *best* of the others in that column by its mean, chosen on the same runs, which flatters the other row
and not ours. Intervals are of one comparison each: of twenty, one excludes 0 by chance.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from common import grid, spread
from scipy import stats

Values = Mapping[int, float]  # by seed
Table = Mapping[str, Mapping[str, Values]]  # by column and row
Method = Literal["t", "bootstrap"]


@dataclass(frozen=True)
class Difference:
    """The mean of paired differences, its interval, and how many pairs there were.

    Args:
        mean: of the differences.
        low: end of the interval; NaN for fewer than two pairs.
        high: the other end.
        p: of the two-sided paired t test; NaN for fewer than two pairs, or where all differences are the same.
        pairs: how many.
    """

    mean: float
    low: float
    high: float
    p: float
    pairs: int

    @property
    def verdict(self) -> Literal["better", "worse", "not told apart"]:
        if self.low > 0:
            return "better"
        return "worse" if self.high < 0 else "not told apart"

    def __str__(self) -> str:
        text = f"{self.mean:+.2f}"
        if self.low == self.low:
            text += f" [{self.low:+.2f}, {self.high:+.2f}]"
        return f"**{text}**" if self.verdict != "not told apart" else text


def paired(ours: Values, other: Values, method: Method = "t", level: float = 0.95) -> Difference:
    """Ours minus the other, over the seeds that both have.

    Args:
        method: ``"t"``, Student's interval; ``"bootstrap"``, percentiles of 9999 resampled means, which do not assume
            normal differences but are too narrow for a handful of pairs.
        level: of the interval.

    Example:
        >>> print(paired({0: 3.0, 1: 4.0, 2: 5.0}, {0: 1.0, 1: 2.5, 2: 2.5}))
        **+2.00 [+0.76, +3.24]**
    """
    seeds = sorted(ours.keys() & other.keys())
    differences = np.array([ours[seed] - other[seed] for seed in seeds], dtype=np.float64)
    differences = differences[np.isfinite(differences)]
    nan = float("nan")
    if len(differences) == 0:
        return Difference(nan, nan, nan, nan, 0)
    mean = float(differences.mean())
    if len(differences) == 1:
        return Difference(mean, nan, nan, nan, 1)
    if np.ptp(differences) == 0:
        return Difference(mean, mean, mean, nan, len(differences))
    test = stats.ttest_1samp(differences, 0.0)
    if method == "t":
        interval = test.confidence_interval(level)
    else:
        drawn = stats.bootstrap(
            (differences,), np.mean, method="percentile", confidence_level=level, random_state=np.random.default_rng(0)
        )
        interval = drawn.confidence_interval
    return Difference(mean, float(interval.low), float(interval.high), float(test.pvalue), len(differences))


def best_other(rows: Mapping[str, Values], ours: Collection[str]) -> str | None:
    """The row with the highest mean of those that are not ours; None if there is none."""
    means = {
        name: statistics.mean(known)
        for name, values in rows.items()
        if name not in ours and (known := [value for value in values.values() if value == value])
    }
    return max(means, key=means.__getitem__, default=None)


def gather(results: Mapping[tuple[str, str, int], Mapping[str, float]], value: Callable[[Mapping], float]) -> Table:
    """A number of every cell, by column, row and seed."""
    table: dict[str, dict[str, dict[int, float]]] = {}
    for (row, column, seed), result in results.items():
        table.setdefault(column, {}).setdefault(row, {})[seed] = value(result)
    return table


def over_columns(table: Table, name: str) -> Table:
    """One column: the mean of all of them, for the rows and seeds that every column has; empty for a single column.

    Example:
        >>> over_columns({"a": {"x": {0: 1.0, 1: 2.0}}, "b": {"x": {0: 3.0}, "y": {0: 1.0}}}, "both")
        {'both': {'x': {0: 2.0}}}
    """
    if len(table) < 2:
        return {}
    columns = list(table.values())
    rows = [row for row in columns[0] if all(row in column for column in columns)]
    mean = {
        row: {
            seed: statistics.mean(column[row][seed] for column in columns)
            for seed in columns[0][row]
            if all(seed in column[row] for column in columns)
        }
        for row in rows
    }
    return {name: mean}


def means(table: Table, rows: Sequence[str], digits: int = 1, bold: bool = True) -> str:
    """Mean ± standard deviation over the seeds, a line per row; the highest mean of a column in bold."""
    columns, lines = list(table), [["", *table]]
    best = {column: best_other({row: table[column].get(row, {}) for row in rows}, ()) for column in columns}
    for row in rows:
        cells = [spread(table[column].get(row, {}).values(), digits) for column in columns]
        if all(cell == "-" for cell in cells):
            continue
        marked = [f"**{c}**" if bold and best[column] == row and c != "-" else c for column, c in zip(columns, cells)]
        lines.append([row, *marked])
    return grid(lines)


def against_best(table: Table, ours: Sequence[str], others: Sequence[str] | None = None, method: Method = "t") -> str:
    """Each of our rows against the best other row of each column, which is named; bold where the interval excludes 0.

    Args:
        others: the rows that may be the best other one; by default all that are not ours.
    """
    lines = [["", *table]]
    for row in ours:
        cells = []
        for rows in table.values():
            allowed = {name: values for name, values in rows.items() if others is None or name in others}
            best = best_other(allowed, ours)
            there = best is not None and rows.get(row)
            cells.append(f"{paired(rows[row], rows[best], method)} against {best}" if there and best else "-")
        lines.append([row, *cells])
    return grid(lines)


def against(table: Table, row: str, others: Sequence[str], method: Method = "t") -> str:
    """A row minus each of the others, a line per other row."""
    lines = [[f"{row} minus", *table]]
    for other in others:
        cells = [
            str(paired(rows[row], rows[other], method)) if rows.get(row) and rows.get(other) else "-"
            for rows in table.values()
        ]
        lines.append([other, *cells])
    return grid(lines)
