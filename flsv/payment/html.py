"""Functions that create the report's HTML: tables, heatmaps, bars, and the page from its template."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined
from pandas import DataFrame

from flsv.results.run_table import ESTIMATE
from flsv.results.text import (
    MESSAGES,
    NO_NUMBER,
    format_number,
    format_rows,
    unbroken,
)
from flsv.utilities.atomic_files import replacing
from flsv.utilities.display import shortened_name
from flsv.utilities.errors import ConfigurationError

#: Largest number of columns of a table, without the first. Wider ones are split into several, one below the other.
MAX_COLUMNS = 7
_POSITIVE = "0, 114, 178"
_NEGATIVE = "213, 94, 0"

_templates = Environment(
    loader=PackageLoader("flsv.payment"),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
)


_templates.filters |= {
    "short": shortened_name,
    "unbroken": unbroken,
}


class Cell(NamedTuple):
    """A table cell with a text, CSS, a text shown on hover, and a CSS class."""

    text: str
    style: str = ""
    title: str = ""
    css: str = ""


@dataclass(frozen=True)
class Table:
    """A table of a page. ``css`` are the names of its CSS classes."""

    head: Sequence[str]
    rows: Sequence[Sequence[str | Cell]]
    caption: str = ""
    css: str = ""

    def parts(self) -> Iterator[tuple[Sequence[str], list[list[Cell]]]]:
        """Split a wide table into few narrower ones, and yield the head and rows of each."""
        num_columns = len(self.head) - 1  # without the first, which every part repeats
        num_parts = max(1, math.ceil(num_columns / MAX_COLUMNS))
        columns_per_part = max(1, math.ceil(num_columns / num_parts))

        for first_column in range(1, num_columns + 1, columns_per_part):
            columns = slice(first_column, first_column + columns_per_part)
            rows = []
            for row in self.rows:
                cells_of_part = [row[0], *row[columns]]
                rows.append([self._cell(cell) for cell in cells_of_part])
            yield [self.head[0], *self.head[columns]], rows

    @staticmethod
    def _cell(cell: str | Cell) -> Cell:
        """Convert a text to a cell that keeps an interval on one line."""
        if isinstance(cell, Cell):
            return cell
        return Cell(unbroken(cell).replace(" to ", "\u00a0to\u00a0"))


def write_page(path: Path, **content: Any) -> None:
    """Write a page with this content, see ``templates/report.html``."""
    if path.suffix != ".html":
        raise ConfigurationError(f"out={str(path)!r}: expected a file that ends with .html.")
    template = _templates.get_template("report.html")
    defaults = {"messages": MESSAGES, "subtitle": "", "appendix": {}}
    html = template.render(defaults | content)
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as file:
        file.write(html.encode())


def table_of_clients(
    names: Sequence[str],
    columns: Mapping[str, Sequence[Any]],
) -> Table:
    """Return a table with a row per client."""
    all_columns = [names, *columns.values()]
    rows = [list(row) for row in zip(*all_columns)]
    return Table(["partner", *columns], rows)


def table_of_texts(texts: Mapping[str, object]) -> Table | None:
    """Return a table of names and texts, or None if there are none."""
    if not texts:
        return None
    rows = [[name, str(text)] for name, text in texts.items()]
    return Table(["", ""], rows, css="texts")


def heatmap_table(values: DataFrame, caption: str) -> Table:
    """Return a heatmap of ``values``: blue above 0, orange below, stronger further from 0.

    The largest number has two significant digits.
    """
    columns = list(map(str, values.columns))
    numbers = values.to_numpy(dtype=float)
    finite_numbers = numbers[np.isfinite(numbers)]
    largest = float(np.abs(finite_numbers).max(initial=0.0))
    if largest == 0:
        largest = 1.0

    rows = []
    texts_of_rows = format_rows(values, digits=2)
    for name, row_numbers, texts in zip(values.index, numbers.tolist(), texts_of_rows):
        row: list[str | Cell] = [name]
        for column, number, text in zip(columns, row_numbers, texts):
            title = f"{name}, {column}: {format_number(number)}"
            row.append(Cell(text, _heat_style(number, largest), title))
        rows.append(row)
    return Table(["", *columns], rows, caption=caption, css="heat")


def _heat_style(value: float, largest: float) -> str:
    if not math.isfinite(value):
        return ""
    # At most half opaque, so that the text stays legible on light and on dark backgrounds.
    opacity = 0.5 * abs(value) / largest
    return f"background: rgba({_color(value)}, {opacity:.2f})"


def _color(value: float) -> str:
    if value >= 0:
        return _POSITIVE
    return _NEGATIVE


def bar_cells(
    estimates: DataFrame,
    bases: Sequence[float] | None = None,
) -> list[Cell]:
    """Draw each value as a bar, and its interval as a line, in a table cell. All have one scale.

    Args:
        estimates: a row for each bar.
        bases: where each bar begins. None: at 0.
    """
    # One scale for all rows, which includes 0.
    table = estimates[ESTIMATE]
    if bases is None:
        bases = [0.0] * len(table)
    rows = table.add(list(bases), axis=0).to_numpy().tolist()
    numbers = [*bases, *chain.from_iterable(rows)]
    numbers_on_scale = [0.0, *filter(math.isfinite, numbers)]
    scale = _Scale(min(numbers_on_scale), max(numbers_on_scale))
    return [scale.cell(base, *row) for base, row in zip(bases, rows)]


class _Scale(NamedTuple):
    """The numbers at the left and the right edge of a cell."""

    lowest: float
    highest: float

    def cell(
        self,
        base: float,
        end: float,
        low_bound: float,
        high_bound: float,
    ) -> Cell:
        """Return a cell with a bar from ``base`` to ``end``, and a line between the bounds if they are known."""
        value = end - base
        if not math.isfinite(value):
            return Cell(NO_NUMBER)
        layers = []  # the first is on top
        if math.isfinite(low_bound) and math.isfinite(high_bound):
            line = self.bar(low_bound, high_bound, "var(--ink)", height="2px")
            layers.append(line)
        left_edge, right_edge = sorted((base, end))
        bar = self.bar(left_edge, right_edge, f"rgb({_color(value)})", height="1.2em")
        layers.append(bar)
        style = f"background: {', '.join(layers)}"
        return Cell("", style, title=format_number(value), css="bar")

    def bar(
        self,
        begin: float,
        end: float,
        color: str,
        height: str,
    ) -> str:
        """Return a CSS background that is colored between two numbers."""
        begin_percent = self._percent(begin)
        end_percent = self._percent(end)
        stops = [
            f"transparent {begin_percent}",
            f"{color} {begin_percent} {end_percent}",
            f"transparent {end_percent}",
        ]
        gradient = f"linear-gradient(90deg, {', '.join(stops)})"
        return f"{gradient} center / 100% {height} no-repeat"

    def _percent(self, number: float) -> str:
        width = (self.highest - self.lowest) or 1.0
        return f"{(number - self.lowest) * (100 / width):.1f}%"
