"""The tables that a run prints at its end.

A terminal's width is a given: what does not fit stands in a second table below, with the clients' names again, and
numbers are never cut. Into a pipe or a file everything goes as wide as it is.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from flsv.charts import shortened
from flsv.models.imbalance import OWN_SCORES
from flsv.report.measured import own_title
from flsv.report.run_table import MEANING, RunTable

#: Clients that are shown one by one; of more the highest and the lowest ten.
MOST = 20
ENDS = 10
NONE = "\N{EN DASH}"


def print_contributions(
    table: RunTable, metrics: Mapping[str, str], client_names: Sequence[str], learned: Mapping[str, Any]
) -> None:
    """Print what the clients had and what they were worth, per class for up to ten classes.

    Args:
        table: of the last round: the metrics' rows, and ``samples``, ``rounds``, ``weight`` and the scores of clients'
            own models.
        metrics: name to what its columns are called ("class").
        client_names: n names.
        learned: what the run's record says of the model that the metrics share out, see :func:`lines_of`.
    """
    count, console = len(client_names), make_console()
    first = next(iter(metrics), None)
    rows, gap = chosen(table.last(first, count) if first else None, count)
    title = "Contributions"
    if len(rows) < count:
        by = f", by {first}" if first else ""
        title += f" of {len(rows)} of {count} clients{by}; all are in contributions.csv"
    columns = client_columns(table, metrics, count)
    if any("[" in cell for cells in columns.values() for cell in cells):
        title += f"; in brackets {MEANING.partition(':')[0]}"
    print_table(console, title, client_names, columns, rows, gap)
    for name, kind in metrics.items():
        keys = table.columns(name)
        if 0 < len(keys) <= 10:
            by_column = [table.last(name, count, key) for key in keys]
            names = [table.part(name, key).cells["class_name"][0] for key in keys]
            print_table(console, f"{name} by {kind}", client_names, class_columns([*zip(*by_column)], names), rows, gap)
    for line in lines_of(learned):
        console.print(Text(line))


def client_columns(table: RunTable, metrics: Iterable[str], clients: int) -> dict[str, list[str]]:
    """One row per client: what it had and what it was worth. Column to its cells, without the clients' own.

    Args:
        table: see :func:`print_contributions`.
        metrics: their names; intervals stand in brackets behind the values.
        clients: n.
    """
    columns = {name: numbers(table.last(name, clients), 0) for name in ("samples", "rounds")}
    for name in metrics:
        value, *ends = (table.last(name, clients, what=what) for what in ("value", "low", "high"))
        columns[name] = _with_intervals(value, ends)
    for name in ("weight", *OWN_SCORES):
        if name in table.metrics:
            columns[own_title(name) if name in OWN_SCORES else name] = numbers(table.last(name, clients))
    return columns


def class_columns(values: Iterable[Iterable[float]], class_names: Sequence[str] | None = None) -> dict[str, list[str]]:
    """One row per client and one column per class (or whatever the columns are), of a metric's values ``[n, M]``."""
    table = [*zip(*([float(value) for value in row] for row in values))]
    names = [str(class_names[j] if class_names else j) for j in range(len(table))]
    columns: dict[str, list[str]] = {}
    for j, column in enumerate(table):
        # A class may have the name of another, or of the first column.
        header = names[j] if [*columns, *names, "client"].count(names[j]) == 1 else f"{names[j]} ({j})"
        columns[header] = [x.replace("0.", ".", 1) for x in numbers(column, 2)]
    return columns


def chosen(values: Iterable[float] | None, clients: int) -> tuple[list[int], int]:
    """Which clients are shown, and how many of them come before a gap (all, where there is none).

    Few in the order of their numbers; of many the ten with the highest values and the ten with the lowest, of those
    that have one.

    Args:
        values: ``[n]``, what they are ordered by; None: by number.
        clients: n.
    """
    if clients <= MOST:
        return list(range(clients)), clients
    order = list(range(clients))
    if values is not None:
        known = {i: value for i, value in enumerate(map(float, values)) if math.isfinite(value)}
        order = sorted(known, key=lambda i: (-known[i], i))
    if len(order) <= MOST:
        return order, len(order)
    return [*order[:ENDS], *order[-ENDS:]], ENDS


def print_table(
    console: Console,
    title: str,
    names: Sequence[str],
    columns: Mapping[str, Sequence[str]],
    rows: Sequence[int] | None = None,
    gap: int | None = None,
    style: Callable[[str], str] = lambda cell: "",
    corner: str = "client",
) -> None:
    """Print a table, in as many parts as the console's width makes it.

    Args:
        console: see :func:`make_console`.
        title: of the first part.
        names: of the rows.
        columns: header to cells, of all rows.
        rows: those that are shown; None: all.
        gap: how many rows come before a line of dots; None: no dots.
        style: of a cell, as rich names it.
        corner: header of the names.
    """
    rows = range(len(names)) if rows is None else rows
    shown = [(header, [cells[row] for row in rows]) for header, cells in columns.items()]
    first = (corner, [shortened(names[row]) for row in rows])
    console.print(Text(title, style="italic"))  # not the table's, which would break it at the table's width
    while True:
        count = _fitting(first, shown, console.width)
        table = Table(box=SIMPLE_HEAD, padding=(0, 1))
        part = [first, *shown[:count]]
        for header, _ in part:
            # Text, not str: names are the user's, and rich would read markup into "[/b]".
            table.add_column(Text(header), justify="right", no_wrap=True, min_width=0)
        for place, cells in enumerate(zip(*(column for _, column in part))):
            if place == gap and place < len(rows):
                table.add_row(*["\N{HORIZONTAL ELLIPSIS}"] * len(part))
            table.add_row(*(Text(cell, style=style(cell)) for cell in cells))
        console.print(table)
        shown = shown[count:]
        if not shown:
            return


def make_console() -> Console:
    """As wide as the terminal; into a pipe or a file as wide as it takes, unless the variable COLUMNS says."""
    console = Console()
    if not console.is_terminal and not os.environ.get("COLUMNS"):
        console.width = 10_000
    return console


def _fitting(first: tuple[str, Sequence[str]], columns: Sequence[tuple[str, Sequence[str]]], width: int) -> int:
    """How many of the columns fit beside the first; one at least."""
    room = width - 1 - _width(first)
    count = 0
    for column in columns:
        room -= _width(column)
        if room < 0 and count:
            break
        count += 1
    return count


def _width(column: tuple[str, Sequence[str]]) -> int:
    """With a blank on either side, and the box's between two."""
    header, cells = column
    return 3 + max(Text(text).cell_len for text in (header, *cells))


def undecided(record: Mapping[str, Any]) -> list[str]:
    """A sentence for each metric whose sampled values tell no pair of clients apart.

    Example:
        >>> undecided({"undecided": {"sv": {"evaluations": 2550, "needed": 10234}}})[0].partition("; ")[2]
        'about 10,000 would tell one apart, in half of all cases'
    """
    sentences = []
    for metric, told in record.get("undecided", {}).items():
        needed = float(f"{told['needed']:.2g}")
        sentences.append(
            f"{metric}: no pair of clients can be told apart at this budget ({told['evaluations']:,} evaluations); "
            f"about {needed:,.0f} would tell one apart, in half of all cases"
        )
    return sentences


def lines_of(record: Mapping[str, Any]) -> list[str]:
    """What a run's record says of the model that its metrics share out, a line each: the performance at the start and
    at the end, what the values sum to, and whether it is anything.

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
    lines += undecided(record)
    if "not_known" in record:
        lines.append(f"whether the model has learned anything is not known: {record['not_known']}")
    return lines


def _with_intervals(values: Iterable[float], ends: Iterable[Iterable[float]]) -> list[str]:
    """``0.500 [0.250, 0.750]``, with the same decimals for all; the value alone where no interval is known."""
    rows = [[float(value) for value in row] for row in (values, *ends)]
    texts, count = numbers([value for row in rows for value in row]), len(rows[0])
    cells, lows, highs = (texts[place * count : (place + 1) * count] for place in range(3))
    return [x if NONE in (x, low, high) else f"{x} [{low}, {high}]" for x, low, high in zip(cells, lows, highs)]


def numbers(values: Iterable[float], digits: int = 3) -> list[str]:
    """A column of numbers with the same decimals, so many, unless all are whole, or so small that they would be 0."""
    values = [float(value) for value in values]
    known = [abs(value) for value in values if math.isfinite(value)]
    if all(value == int(value) for value in known):  # counts
        digits = 0
    elif known and max(known) < 0.1:
        # Three digits of the largest, not 0.000 for all.
        digits = min(digits + 6, digits - 1 - math.floor(math.log10(max(known))))
    texts = [NONE if value != value else f"{value:.{digits}f}" for value in values]
    return [text.removeprefix("-") if not text.strip("-0.") else text for text in texts]  # what rounds to 0 has no sign
