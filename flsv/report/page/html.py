"""A report as one HTML file: no script, nothing from a network, legible on paper, phones and dark screens."""

from __future__ import annotations

import math

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from flsv.report.page import charts
from flsv.report.page.blocks import Bars, Heat, Lines, Page, number

#: Columns up to which a heatmap has numbers.
NUMBERED = 12
_POSITIVE, _NEGATIVE = "0, 114, 178", "213, 94, 0"


def to_html(page: Page) -> str:
    """The whole file."""
    return _templates.get_template("report.html").render(page=page, numbered=NUMBERED)


def _chart(block: Bars | Lines) -> Markup:
    # Made of escaped texts and numbers, by charts.py.
    return Markup(charts.bars(block) if isinstance(block, Bars) else charts.lines(block))


def _shade(value: float, block: Heat) -> str:
    """The colour of a cell: blue above 0 and orange below, stronger away from it."""
    if not math.isfinite(value):
        return ""
    # Half transparent at most: the ink stays legible, on light and on dark.
    strength = 0.05 + 0.45 * min(1.0, abs(value) / block.bound)
    return f"background: rgba({_POSITIVE if value >= 0 else _NEGATIVE}, {strength:.2f})"


def _short(name: str, longest: int = 22) -> str:
    """On one line, and not longer than there is room."""
    name = " ".join(name.split())
    return name if len(name) <= longest else name[: longest - 1] + "…"


_templates = Environment(
    loader=PackageLoader("flsv.report.page"),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
)
_templates.filters |= {
    "kind": lambda block: type(block).__name__,
    "chart": _chart,
    "shade": _shade,
    "short": _short,
    "number": number,
}
