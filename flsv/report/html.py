"""The HTML of a page: figures, tables and heatmaps, and the templates that lay them out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from flsv.functional.intervals import BRACKETS
from flsv.results.text import WORDS, number, titled
from flsv.utilities.charts import shortened_name

#: Largest number of columns of a heatmap with numbers in its cells.
NUMBERED = 12
#: Largest number of columns in a table, without the first; wider tables are split into several, one below the other.
#: The second number is for heatmaps without numbers.
WIDEST, WIDEST_NARROW = 7, 20
#: Characters of a row that fit on a telephone, where each cell takes two more for its margins.
PHONE = 42
_POSITIVE, _NEGATIVE = "0, 114, 178", "213, 94, 0"

_templates = Environment(
    loader=PackageLoader("flsv.report"),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
)
_templates.filters["titled"] = titled
_parts: Any = _templates.get_template("parts.html").module


def render(template: str, **content: Any) -> str:
    """Return the HTML file for a page: a template of this package with its ``content``."""
    known = {"words": WORDS, "BRACKETS": BRACKETS, "table": table}
    return _templates.get_template(template).render(known | content)


def figure(caption: str, content: Markup | str, css: str = "") -> Markup:
    """Return a ``<figure>`` with content and caption, which no page break separates in print; ``css`` are the names of
    its CSS classes."""
    return _parts.figure(caption, Markup(content), css)


def table(head: Sequence[str], rows: Sequence[Sequence[str]], texts: bool = False, caption: str = "") -> Markup:
    """Return an HTML table of texts, aligned right but for the first column; wide rows become cards on a telephone."""
    pieces = []
    for part in _slices(len(head) - 1, WIDEST):
        shown = [[row[0], *row[1:][part]] for row in (head, *rows)]
        wide = sum(2 + max(map(len, column)) for column in zip(*shown)) > PHONE
        css = ["texts"] * texts + ["cards"] * (wide and any(head) and len(head) > 2)
        pieces.append(_parts.table(shown[0], shown[1:], " ".join(css)))
    return _figures(caption, pieces)


def heat(
    names: Sequence[str], columns: Sequence[str], values: Sequence[Sequence[float]], corner: str, caption: str
) -> Markup:
    """Return a heatmap of ``values [k][M]``: blue above 0, orange below, the stronger the further from 0."""
    few = len(columns) <= NUMBERED
    bound = max((abs(x) for row in values for x in row if math.isfinite(x)), default=0.0) or 1.0

    def cell(name: str, column: str, value: float) -> tuple[str, str, str]:
        # At most half opaque: the text stays legible, on light and on dark.
        color, strength = _POSITIVE if value >= 0 else _NEGATIVE, 0.05 + 0.45 * min(1.0, abs(value) / bound)
        style = f"background: rgba({color}, {strength:.2f})" if math.isfinite(value) else ""
        return number(value, 2) if few else "", f"{name}, {column}: {number(value)}", style

    rows = [(name, [cell(name, *each) for each in zip(columns, row)]) for name, row in zip(names, values)]
    heads = [(column, shortened_name(column)) for column in columns]
    pieces = [
        _parts.heat(corner, heads[part], [(n, cells[part]) for n, cells in rows], "heat" if few else "heat narrow")
        for part in _slices(len(columns), WIDEST if few else WIDEST_NARROW)
    ]
    return _figures(caption, pieces)


def _figures(caption: str, pieces: Sequence[Markup]) -> Markup:
    return Markup("").join(figure("" if place else caption, piece, "wide") for place, piece in enumerate(pieces))


def _slices(count: int, most: int) -> list[slice]:
    """Return slices that split ``count`` columns into as few parts as possible, of about equal size, each at most
    ``most`` wide."""
    parts = max(1, math.ceil(count / most))
    size = math.ceil(count / parts) or 1
    return [slice(start, start + size) for start in range(0, max(count, 1), size)]
