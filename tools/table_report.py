"""From a table's results to Markdown and CSV: means over the seeds, and paired differences.

Runs of one seed have the same data, clients and initial weights in every row, so that rows are compared by their
differences seed by seed. A row is called better or worse only where the interval of the mean difference excludes 0. The
*best* other row of a column is chosen by its mean on the same runs, which flatters that row and not ours.

What stands under ``tables`` in a table's YAML, each with a ``title``:

    value:    path into what a cell measured; a list at its end is averaged. ``{row}`` or ``{column}`` in it: the keys
              found there are the table's rows or columns, in place of the cell's
    of:       "module:function" of a cell's result and those of the same column and seed by row: the path's start
    rows:     names or patterns, in the table's order; columns: the same; cells: of the cells' rows, where ``{row}``
    digits:   of means (1), or a format; scale: what values are multiplied by
    interval: true: means with their 95 % interval in the place of the deviation
    pool:     the runs of all columns are counted as one column's, of this name
    ours:     rows, each compared with the best other one (of ``others``, by default all that are not ours)
    minus:    row to the rows that are subtracted from it
    average:  name of one more table: the mean over the columns
    paper:    column to row to what the paper says, in brackets beside ours
"""

from __future__ import annotations

import csv
import statistics
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np
from cells import Results, named
from common import grid
from scipy import stats

Values = Mapping[Any, float]  # by seed
Table = dict[str, dict[str, dict[Any, float]]]  # by column and row
KEYS = {"title", "value", "of", "rows", "columns", "digits", "scale", "pool", "ours", "others", "minus", "average"}
KEYS |= {"paper", "interval", "cells"}


@dataclass(frozen=True)
class Difference:
    """The mean of paired differences, its 95 % interval (NaN for fewer than two pairs), and how many pairs."""

    mean: float
    low: float
    high: float
    pairs: int

    def __str__(self) -> str:
        text = f"{self.mean:+.2f}"
        if self.low == self.low:
            text += f" [{self.low:+.2f}, {self.high:+.2f}]"
        return f"**{text}**" if self.low > 0 or self.high < 0 else text


def paired(ours: Values, other: Values) -> Difference:
    """Ours minus the other, over the seeds that both have, with Student's interval.

    Example:
        >>> print(paired({0: 3.0, 1: 4.0, 2: 5.0}, {0: 1.0, 1: 2.5, 2: 2.5}))
        **+2.00 [+0.76, +3.24]**
    """
    seeds = sorted(ours.keys() & other.keys())
    differences = np.array([ours[seed] - other[seed] for seed in seeds], dtype=np.float64)
    differences = differences[np.isfinite(differences)]
    pairs, nan = len(differences), float("nan")
    mean = float(differences.mean()) if pairs else nan
    if pairs < 2:
        return Difference(mean, nan, nan, pairs)
    if np.ptp(differences) == 0:
        return Difference(mean, mean, mean, pairs)
    interval = stats.ttest_1samp(differences, 0.0).confidence_interval(0.95)
    return Difference(mean, float(interval.low), float(interval.high), pairs)


def spread(values: Iterable[float], digits: int | str = 2) -> str:
    """Mean and standard deviation; NaN is left out, and "-" stands for nothing. ``digits`` may be a format."""
    known = [value for value in values if value == value]
    if not known:
        return "-"
    form = f".{digits}f" if isinstance(digits, int) else digits
    return f"{statistics.mean(known):{form}} ± {statistics.stdev(known) if len(known) > 1 else 0.0:{form}}"


def with_interval(values: Values) -> str:
    """The mean and its 95 % interval, without a verdict."""
    found = paired(values, dict.fromkeys(values, 0.0))
    return f"{found.mean:.2f} [{found.low:.2f}, {found.high:.2f}]" if found.pairs else "-"


def best_other(rows: Mapping[str, Values], ours: Collection[str]) -> str | None:
    """The row with the highest mean of those that are not ours; None if there is none."""
    means = {
        name: statistics.mean(known)
        for name, values in rows.items()
        if name not in ours and (known := [value for value in values.values() if value == value])
    }
    return max(means, key=means.__getitem__, default=None)


def over_columns(table: Table, name: str) -> Table:
    """One column: the mean of all, for the rows and seeds that every column has.

    Example:
        >>> over_columns({"a": {"x": {0: 1.0, 1: 2.0}}, "b": {"x": {0: 3.0}, "y": {0: 1.0}}}, "both")
        {'both': {'x': {0: 2.0}}}
    """
    first, *rest = table.values()
    rows = {
        row: {
            seed: statistics.mean(column[row][seed] for column in (first, *rest))
            for seed in seeds
            if all(seed in column[row] for column in rest)
        }
        for row, seeds in first.items()
        if all(row in column for column in rest)
    }
    return {name: rows}


def matches(name: str, patterns: Sequence[str] | None) -> bool:
    """Whether a name is one of the patterns, or there are none."""
    return patterns is None or any(fnmatchcase(name, str(pattern)) for pattern in patterns)


def entries(value: Any, path: Sequence[str], row: str, column: str) -> Iterator[tuple[str, str, float]]:
    """The numbers at the end of a path, with their row and column.

    Example:
        >>> list(entries({"a": {"x": [1.0, 3.0]}, "b": {"x": 5.0}}, ["{row}", "x"], "run", "digits"))
        [('a', 'digits', 2.0), ('b', 'digits', 5.0)]
    """
    if not path:
        numbers = [float(each) for each in (value if isinstance(value, list) else [value]) if each is not None]
        yield row, column, statistics.mean(numbers) if numbers else float("nan")
        return
    step, *rest = path
    inner = dict(enumerate(value, 1)) if isinstance(value, list) else value
    if step not in ("{row}", "{column}"):
        if (next_one := inner.get(int(step) if step.isdigit() and isinstance(value, list) else step)) is not None:
            yield from entries(next_one, rest, row, column)
        return
    for key, each in inner.items():
        if each is not None:
            yield from entries(each, rest, *((str(key), column) if step == "{row}" else (row, str(key))))


def gathered(show: Mapping[str, Any], results: Results) -> Table:
    """A table's numbers by column, row and seed, in the table's order."""
    path = show.get("value", "").split("/") if show.get("value") else []
    own_rows = "{row}" not in path
    found: Table = {}
    for (row, column, seed), result in results.items():
        if not matches(column, show.get("columns")):
            continue
        if not matches(row, show.get("cells", show.get("rows") if own_rows else None)):
            continue
        value: Any = result
        if "of" in show:
            beside = {r: each for (r, c, s), each in results.items() if (c, s) == (column, seed)}
            value = named(show["of"])(result, beside, row, column)
        for r, c, number in entries(value, path, row, column) if value is not None else ():
            if matches(r, show.get("rows")):
                place = show.get("pool", c)
                key = seed if place == column else (column, seed)
                found.setdefault(place, {}).setdefault(r, {})[key] = show.get("scale", 1.0) * number
    return {column: ordered(rows, show.get("rows")) for column, rows in found.items()}


def ordered(rows: dict[str, Any], patterns: Sequence[str] | None) -> dict[str, Any]:
    """In the order of the patterns."""
    if patterns is None:
        return rows
    return {row: rows[row] for pattern in patterns for row in rows if fnmatchcase(row, str(pattern))}


def means(table: Table, show: Mapping[str, Any]) -> list[list[str]]:
    """Mean ± standard deviation over the seeds, a line per row; the paper's number in brackets."""
    rows = dict.fromkeys(row for column in table.values() for row in column)
    lines, paper = [["", *table]], show.get("paper", {})
    for row in ordered(rows, show.get("rows")):
        cells = []
        for column, values in table.items():
            numbers = values.get(row, {})
            cell = with_interval(numbers) if "interval" in show else spread(numbers.values(), show.get("digits", 1))
            theirs = paper.get(column, {}).get(row)
            cells.append(cell if theirs is None or cell == "-" else f"{cell} ({theirs})")
        lines.append([row, *cells])
    return lines


def differences(table: Table, show: Mapping[str, Any]) -> list[list[str]]:
    """Ours against the best other row of each column, which is named; and the rows of ``minus``."""
    lines = [["minus", *table]]
    for row in show.get("ours", ()):
        cells = []
        for rows in table.values():
            others = show.get("others") or [name for name in rows if name not in show["ours"]]
            best = best_other({name: rows[name] for name in others if name in rows}, show["ours"])
            there = best is not None and row in rows
            cells.append(f"{paired(rows[row], rows[best])} against {best}" if there else "-")
        lines.append([f"{row} minus the best other", *cells])
    for row, others in show.get("minus", {}).items():
        for other in others:
            cells = [
                str(paired(rows[row], rows[other])) if row in rows and other in rows else "-" for rows in table.values()
            ]
            lines.append([f"{row} minus {other}", *cells])
    return lines


def report(shows: Sequence[Mapping[str, Any]], results: Results) -> list[tuple[str, list[list[str]]]]:
    """Every table that has a number: title and lines, the head first."""
    made: list[tuple[str, list[list[str]]]] = []
    for show in shows:
        table = gathered(show, results)
        parts = [(show["title"], table)]
        if "average" in show and len(table) > 1:
            parts.append((f"{show['title']}: {show['average']}", over_columns(table, show["average"])))
        for title, part in parts:
            if not any(part.values()):
                continue
            made.append((title, means(part, show)))
            if len(lines := differences(part, show)) > 1:
                made.append((f"{title}: differences, 95 % paired interval", lines))
    return made


def markdown(tables: Sequence[tuple[str, list[list[str]]]]) -> str:
    """All tables below their titles."""
    return "\n\n".join(f"{title}:\n\n{grid(lines)}" for title, lines in tables)


def write_csv(path: Path, tables: Sequence[tuple[str, list[list[str]]]]) -> None:
    """A line per entry: table, row, column, value."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["table", "row", "column", "value"])
        for title, (head, *lines) in tables:
            for row, *cells in lines:
                writer.writerows((title, row, column, cell) for column, cell in zip(head[1:], cells))
