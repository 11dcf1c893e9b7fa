"""Functions that make the report's HTML: tables, heatmaps, bars, and the page from its template."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from jinja2 import Environment, PackageLoader, StrictUndefined

from flsv.results.text import NONE, WORDS, number, percent, titled
from flsv.utilities.charts import shortened_name

#: Largest number of columns of a table, without the first. Wider ones are split into several, one below the other. The
#: second number is for heatmaps without numbers, which those with more than :data:`NUMBERED` columns are.
WIDEST, WIDEST_NARROW, NUMBERED = 7, 20, 12
_POSITIVE, _NEGATIVE = "0, 114, 178", "213, 94, 0"

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
        count, widest = len(self.head) - 1, WIDEST_NARROW if "narrow" in self.css else WIDEST
        size = math.ceil(count / max(1, math.ceil(count / widest))) or 1
        for first in range(1, count + 1, size):
            rows = [
                [self._cell(each) for each in (row[0], *row[first : first + size])]
                for row in self.rows
            ]
            yield [self.head[0], *self.head[first : first + size]], rows

    @staticmethod
    def _cell(cell: str | Cell) -> Cell:
        """Convert a text to a cell that keeps an interval, such as ``1 to 2``, on one line."""
        return cell if isinstance(cell, Cell) else Cell(cell.replace(" to ", "\u00a0to\u00a0"))


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
    few = len(columns) <= NUMBERED
    bound = max((abs(x) for row in values for x in row if math.isfinite(x)), default=0.0) or 1.0

    def cell(name: str, column: str, value: float) -> Cell:
        # At most half opaque: the text stays legible, on light and on dark.
        color, strength = (
            _POSITIVE if value >= 0 else _NEGATIVE,
            0.05 + 0.45 * min(1.0, abs(value) / bound),
        )
        style = f"background: rgba({color}, {strength:.2f})" if math.isfinite(value) else ""
        return Cell(number(value, 2) if few else "", style, f"{name}, {column}: {number(value)}")

    rows: list[list[str | Cell]] = [
        [name, *(cell(name, *each) for each in zip(columns, row))]
        for name, row in zip(names, values)
    ]
    return Table([corner, *columns], rows, caption, "heat" if few else "heat narrow")


def bars(values: Sequence[float], low: Sequence[float], high: Sequence[float]) -> list[Cell]:
    """Draw each value as a bar, and its interval as a line, in a table cell. All have one scale."""
    ends = [x for x in (0.0, *values, *low, *high) if math.isfinite(x)]
    scale = 100 / ((max(ends) - min(ends)) or 1.0)

    def layer(start: float, end: float, color: str, height: str) -> str:
        first, last = (f"{(x - min(ends)) * scale:.1f}%" for x in (start, end))
        stops = f"transparent {first}, {color} {first} {last}, transparent {last}"
        return f"linear-gradient(90deg, {stops}) center / 100% {height} no-repeat"

    def cell(value: float, least: float, most: float) -> Cell:
        if not math.isfinite(value):
            return Cell(NONE)
        color = f"rgb({_POSITIVE if value >= 0 else _NEGATIVE})"
        layers = [layer(min(0.0, value), max(0.0, value), color, "60%")]
        if math.isfinite(least) and math.isfinite(most):
            layers.insert(0, layer(least, most, "var(--ink)", "2px"))
        return Cell("", f"background: {', '.join(layers)}", number(value))

    return [cell(*each) for each in zip(values, low, high)]
