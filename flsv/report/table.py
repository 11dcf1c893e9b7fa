"""The table at the end of a run: who had what, and what it was worth.

A terminal's width is a given: what does not fit stands in a second table below, with the clients' names again, and
numbers are never cut. Into a pipe or a file everything goes as wide as it is.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import Tensor

#: Clients that are shown one by one; of more the highest and the lowest ten.
MOST = 20
ENDS = 10
NONE = "\N{EN DASH}"
#: Characters of a name.
LONGEST = 24


def client_columns(
    num_samples: Tensor,
    values: Mapping[str, Tensor],
    weights: Tensor | None,
    accuracy: Tensor | None = None,
    rounds: Tensor | None = None,
    intervals: Mapping[str, Tensor] | None = None,
) -> dict[str, list[str]]:
    """One row per client: what it had and what it was worth. Column to its cells, without the clients' own.

    Args:
        num_samples: ``[n]`` training samples.
        values: metric name to ``[n]``, a client's overall contribution.
        weights: ``[n]`` weights of the last aggregation, NaN for clients outside its cohort.
        accuracy: ``[n]`` accuracy of the clients' own models.
        rounds: ``[n]``, how many rounds each client took part in.
        intervals: metric name to the low and high ends ``[2, n]``, which stand in brackets behind the values.
    """
    columns = {"samples": _numbers(num_samples, 0)}
    if rounds is not None:
        columns["rounds"] = _numbers(rounds, 0)
    for name, value in values.items():
        ends = None if intervals is None else intervals.get(name)
        columns[name] = _numbers(value, 3) if ends is None else _with_intervals(value, ends)
    if weights is not None:
        columns["weight"] = _numbers(weights, 3)
    if accuracy is not None:
        columns["own accuracy"] = _numbers(accuracy, 3)
    return columns


def class_columns(values: Tensor, class_names: Sequence[str] | None = None) -> dict[str, list[str]]:
    """One row per client and one column per class (or whatever the columns are), of a metric's values ``[n, M]``."""
    names = [str(class_names[j] if class_names else j) for j in range(values.shape[1])]
    columns: dict[str, list[str]] = {}
    for j, column in enumerate(values.T):
        # A class may have the name of another, or of the first column.
        header = names[j] if [*columns, *names, "client"].count(names[j]) == 1 else f"{names[j]} ({j})"
        columns[header] = [x.replace("0.", ".", 1) for x in _numbers(column, 2)]
    return columns


def chosen(values: Tensor | None, clients: int) -> tuple[list[int], int]:
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
        known = [i for i, value in enumerate(values.tolist()) if math.isfinite(value)]
        order = sorted(known, key=lambda i: (-values[i].item(), i))
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
    first = (corner, [short(names[row]) for row in rows])
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


def short(name: str) -> str:
    """A name on one line, of 24 characters at most."""
    name = " ".join(name.split())
    return name if len(name) <= LONGEST else name[: LONGEST - 1] + "\N{HORIZONTAL ELLIPSIS}"


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


def _with_intervals(values: Tensor, ends: Tensor) -> list[str]:
    """``0.500 [0.250, 0.750]``, with the same decimals for all."""
    texts = _numbers(torch.cat([values.detach().cpu().double(), *ends]), 3)
    count = len(values)
    triples = zip(texts[:count], texts[count : 2 * count], texts[2 * count :])
    return [value if NONE in (value, low, high) else f"{value} [{low}, {high}]" for value, low, high in triples]


def _numbers(values: Tensor, digits: int) -> list[str]:
    numbers = values.tolist()
    known = [abs(value) for value in numbers if math.isfinite(value)]
    if all(value == int(value) for value in known):  # counts
        digits = 0
    elif known and max(known) < 0.1:
        # Three digits of the largest, not 0.000 for all.
        digits = min(digits + 6, digits - 1 - math.floor(math.log10(max(known))))
    return [NONE if value != value else f"{value:.{digits}f}" for value in numbers]
