"""The HTML of a page: figures, tables and heatmaps, and the templates that lay them out."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from flsv.results.text import number
from flsv.utilities.charts import shortened_name

#: Columns up to which a heatmap has numbers.
NUMBERED = 12
#: Columns of a table beside its first one; those of a wider one stand in further tables below it. Likewise of a heatmap
#: without numbers.
WIDEST, WIDEST_NARROW = 7, 20
#: Characters of a row that a telephone has room for, two of each cell for the space about it.
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
_parts: Any = _templates.get_template("parts.html").module


def to_html(page: Mapping[str, Any]) -> str:
    """Write the whole file: a title, a subtitle, the sections of its front and of its appendix."""
    return _templates.get_template("report.html").render(page)


def section(title: str, *parts: Markup | str | Sequence[str] | None) -> Markup:
    """Write a heading and what stands below it: texts as paragraphs, lists with a line each; "" without any."""
    return _parts.section(title, [_block(part) for part in parts if part]) if any(parts) else Markup("")


def _block(part: Markup | str | Sequence[str]) -> Markup:
    if isinstance(part, Markup):
        return part
    return _parts.paragraph(part) if isinstance(part, str) else _parts.bullets(part)


def warning(text: str) -> Markup:
    """Write a paragraph that is seen first."""
    return _parts.paragraph(text, "warning")


def command(text: str) -> Markup:
    """Write a command that can be pasted into a shell."""
    return _parts.command(text)


def figure(caption: str, content: Markup | str, css: str = "") -> Markup:
    """Write content with a caption that stays with it, on paper, too."""
    return _parts.figure(caption, Markup(content), css)


def table(head: Sequence[str], rows: Sequence[Sequence[str]], texts: bool = False, caption: str = "") -> Markup:
    """Show cells as they are; the first column is text, the others stand to the right unless ``texts``. On a telephone
    the rows of a wide table are cards; one without a head has no names that a card would need."""
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
    """Write values ``[k][M]`` as a heatmap, colored about 0: blue above and orange below, stronger away from it."""
    few = len(columns) <= NUMBERED
    bound = max((abs(x) for row in values for x in row if math.isfinite(x)), default=0.0) or 1.0

    def cell(name: str, column: str, value: float) -> tuple[str, str, str]:
        # Half transparent at most: the ink stays legible, on light and on dark.
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
    """Split so many columns into as few parts of at most ``most`` as there can be, of about one size."""
    parts = max(1, math.ceil(count / most))
    size = math.ceil(count / parts) or 1
    return [slice(start, start + size) for start in range(0, max(count, 1), size)]
