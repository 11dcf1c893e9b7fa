"""A report's charts: inline SVG in the page's own colors, legible on light and dark backgrounds.

Matplotlib draws them, as it does in TensorBoard. Parts that it adds to a file are removed: dates and versions, which
would differ from run to run, and styles, which would apply to the whole page.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import matplotlib
import numpy as np
from markupsafe import Markup, escape
from matplotlib.figure import Figure

from flsv.report.html import figure
from flsv.results.text import number
from flsv.utilities.charts import ENDS, MOST_COLOURS, draw_bars, draw_lines, drawing
from flsv.utilities.plots import draw_steps

#: The page's colors for parts that matplotlib draws in black or dark gray.
_INK = {"#000000": "var(--ink)", "#333333": "var(--ink)", "#808080": "var(--dim)"}
_OWN = re.compile(
    r"<!--.*?-->|<metadata>.*?</metadata>|<style.*?</style>|<clipPath.*?</clipPath>"
    r'| clip-path="[^"]*"| id="(?:figure|axes|patch|text|matplotlib)[^"]*"',
    re.DOTALL,
)
#: Width of a chart in inches, narrow enough for its text to be legible on a telephone; and the left and the right end
#: of its axes, as fractions of the width.
_WIDTH, _LEFT, _RIGHT = 5.2, 0.115, 0.985
#: Average width of a letter in inches.
_LETTER = 0.06


def bars(
    names: Sequence[str],
    values: Sequence[float],
    ends: Sequence[Sequence[float]],
    caption: str = "",
    of_seeds: bool = False,
) -> Markup:
    """Return a bar chart of ``values [k]`` with intervals ``ends [2, k]``, dark if they are of several seeds."""
    known = np.array(values, dtype=float)
    reach = np.array([known - ends[0], ends[1] - known])
    errors = np.where(np.isfinite(reach), reach.clip(min=0), np.nan)
    words = [f"{name} {number(value) if value == value else 'no value'}" for name, value in zip(names, values)]

    def draw(axis: Any) -> None:
        draw_bars(axis, known, names, errors=errors, of_seeds=of_seeds)
        axis.set_xlabel("")
        _level(axis, names)

    return figure(caption, _svg(f"bars of {len(values)} values", words, draw, 1.9, _below(names)))


def steps(
    names: Sequence[str],
    values: Sequence[float],
    start: float,
    end: float,
    caption: str,
    unit: str,
    less_is_better: bool,
) -> Markup:
    """Return a waterfall chart from ``start`` to ``end``, whose steps are ``values``."""
    words = [f"start {number(start)}", *(f"{n} {number(v)}" for n, v in zip(names, values)), f"end {number(end)}"]
    heads = [*names, "start", "end"]

    def draw(axis: Any) -> None:
        draw_steps(axis, values, names, start, end, unit=unit, less_is_better=less_is_better)
        _level(axis, heads)

    title = f"from {number(start)} to {number(end)} in {len(values)} steps"
    return figure(caption, _svg(title, words, draw, 1.75, _below(heads)))


def lines(names: Sequence[str], values: np.ndarray, rounds: Sequence[int], caption: str) -> Markup:
    """Return a chart of the values ``[r, k]`` of k names in r rounds: one line per name, with a legend below."""
    values = np.where(np.isfinite(values), values, np.nan)
    words = []
    for name, line in zip(names, values.T):
        known = line[np.isfinite(line)]
        words.append(f"{name} from {number(known[0])} to {number(known[-1])}" if len(known) else f"{name} no value")

    def draw(axis: Any) -> None:
        draw_lines(axis, values, names, rounds=rounds)
        handles, labels = axis.get_legend_handles_labels()
        axis.figure.legend(handles, labels, loc="lower center", ncols=3, frameon=False, fontsize=9)

    shown = len(names) if len(names) <= MOST_COLOURS else 2 * ENDS
    title = f"lines of {len(names)} over {len(rounds)} rounds"
    return figure(caption, _svg(title, words, draw, 2.1, 0.6 + 0.19 * math.ceil(shown / 3)))


def _fit(names: Sequence[str]) -> bool:
    """Return whether the names fit side by side under the bars without being turned."""
    return 1.5 * _LETTER * max(map(len, names), default=0) * len(names) < _WIDTH


def _below(names: Sequence[str]) -> float:
    return 0.25 + (0.0 if _fit(names) else _LETTER * min(24, max(map(len, names), default=0)))


def _level(axis: Any, names: Sequence[str]) -> None:
    for text in axis.get_xticklabels() if _fit(names) else ():
        text.set(rotation=0, horizontalalignment="center", rotation_mode="default")


def _svg(title: str, words: Sequence[str], draw: Callable[[Any], None], height: float, below: float) -> str:
    """Return what ``draw`` draws as an SVG element, "" if it fails; ``height`` and ``below`` are in inches."""
    buffer, description = io.StringIO(), ", ".join(" ".join(text.split()) for text in words)
    # The same chart always has the same bytes; names are text that can be searched and read out.
    with drawing(title), matplotlib.rc_context({"svg.hashsalt": description, "svg.fonttype": "none"}):
        figure = Figure(figsize=(_WIDTH, height + below))
        draw(figure.add_axes((_LEFT, below / (height + below), _RIGHT - _LEFT, 0.96 - below / (height + below))))
        figure.savefig(buffer, format="svg", transparent=True)
        return _inline(buffer.getvalue(), title, description)
    return ""


def _inline(text: str, title: str, description: str) -> str:
    """Convert the ``text`` of matplotlib's SVG file to an element of an HTML page, with a title and a description."""
    _, box, body = re.split(r'(viewBox="[^"]*")[^>]*>', text, maxsplit=1)
    body = _OWN.sub("", body)
    for black, ink in _INK.items():
        body = body.replace(black, ink)
    words = f"<title>{escape(title)}</title><desc>{escape(description)}</desc>"
    return " ".join(f'<svg class="chart" role="img" {box}>{words}{body}'.split())
