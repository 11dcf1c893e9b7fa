"""Functions that make the report's HTML: tables, heatmaps, bars, and the page from its template."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

from jinja2 import Environment, PackageLoader, StrictUndefined

from flsv.results.text import NONE, WORDS, number, percent, titled
from flsv.utilities.charts import shortened_name

#: Largest number of columns of a table, without the first. Wider ones are split into several, one below the other. The
#: second number is for heatmaps without numbers, which those with more than :data:`NUMBERED` columns are.
WIDEST = 7
WIDEST_NARROW = 20
NUMBERED = 12
_POSITIVE = "0, 114, 178"
_NEGATIVE = "213, 94, 0"

_templates = Environment(
    loader=PackageLoader("flsv.report"),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
)
_templates.filters |= {"titled": titled, "percent": percent, "short": shortened_name}


class Cell(NamedTuple):
    """A table cell with a text, CSS, and a text shown on hover."""

    text: str
    style: str = ""
    title: str = ""


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
        widest = WIDEST_NARROW if "narrow" in self.css else WIDEST
        num_parts = max(1, math.ceil(num_columns / widest))
        columns_per_part = math.ceil(num_columns / num_parts) or 1

        for first_column in range(1, num_columns + 1, columns_per_part):
            columns = slice(first_column, first_column + columns_per_part)
            rows = []
            for row in self.rows:
                part = [row[0], *row[columns]]
                rows.append([self._cell(cell) for cell in part])
            yield [self.head[0], *self.head[columns]], rows

    @staticmethod
    def _cell(cell: str | Cell) -> Cell:
        """Convert a text to a cell that keeps an interval, such as ``1 to 2``, on one line."""
        if isinstance(cell, Cell):
            return cell
        return Cell(cell.replace(" to ", "\u00a0to\u00a0"))


def render(**content: Any) -> str:
    """Return the report's HTML with this content, see ``templates/report.html``."""
    return _templates.get_template("report.html").render(words=WORDS, **content)


def heat(
    names: Sequence[str],
    columns: Sequence[str],
    values: Sequence[Sequence[float]],
    corner: str,
    caption: str,
) -> Table:
    """Return a heatmap of ``values``, k rows and M columns: blue above 0, orange below, stronger further from 0."""
    has_numbers = len(columns) <= NUMBERED
    finite_values = filter(math.isfinite, chain.from_iterable(values))
    largest = max(map(abs, finite_values), default=0.0) or 1.0

    def cell(name: str, column: str, value: float) -> Cell:
        style = ""
        if math.isfinite(value):
            color = _POSITIVE if value >= 0 else _NEGATIVE
            # At most half opaque: the text stays legible, on light and on dark.
            opacity = 0.05 + 0.45 * min(1.0, abs(value) / largest)
            style = f"background: rgba({color}, {opacity:.2f})"
        text = number(value, 2) if has_numbers else ""
        return Cell(text, style, f"{name}, {column}: {number(value)}")

    rows: list[list[str | Cell]] = []
    for name, row in zip(names, values):
        cells = map(partial(cell, name), columns, row)
        rows.append([name, *cells])
    return Table(
        [corner, *columns],
        rows,
        caption=caption,
        css="heat" if has_numbers else "heat narrow",
    )


def bars(
    values: Sequence[float],
    low: Sequence[float],
    high: Sequence[float],
) -> list[Cell]:
    """Draw each value as a bar, and its interval as a line, in a table cell. All have one scale."""
    drawn_numbers = list(filter(math.isfinite, [0.0, *values, *low, *high]))
    lowest = min(drawn_numbers)
    scale = 100 / ((max(drawn_numbers) - lowest) or 1.0)

    def layer(left_edge: float, right_edge: float, color: str, height: str) -> str:
        left_stop = f"{(left_edge - lowest) * scale:.1f}%"
        right_stop = f"{(right_edge - lowest) * scale:.1f}%"
        stops = (
            f"transparent {left_stop}, {color} {left_stop} {right_stop}, transparent {right_stop}"
        )
        return f"linear-gradient(90deg, {stops}) center / 100% {height} no-repeat"

    def cell(value: float, low_bound: float, high_bound: float) -> Cell:
        if not math.isfinite(value):
            return Cell(NONE)
        color = f"rgb({_POSITIVE if value >= 0 else _NEGATIVE})"
        left_edge, right_edge = sorted((0.0, value))
        layers = [layer(left_edge, right_edge, color, height="60%")]
        if math.isfinite(low_bound) and math.isfinite(high_bound):
            # The first layer is on top.
            layers.insert(0, layer(low_bound, high_bound, "var(--ink)", height="2px"))
        return Cell("", f"background: {', '.join(layers)}", number(value))

    return list(map(cell, values, low, high))
