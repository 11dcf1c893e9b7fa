"""A report's charts: inline SVG that takes its ink from the page, legible on light and dark alike.

Matplotlib draws them, as it does in TensorBoard. What it adds to a file of its own is left out: dates and versions,
which would differ from run to run, styles, which would hold for the whole page, and references by address.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Sequence
from typing import Any
from xml.etree import ElementTree

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from flsv.charts import ENDS, MOST_COLOURS, draw_bars, draw_lines, drawing
from flsv.plots import draw_steps
from flsv.report.blocks import Bars, Lines, Steps, number

#: What is drawn in black or a dark grey has the page's colours.
_INK = {"#000000": "var(--ink)", "#333333": "var(--ink)", "#808080": "var(--dim)"}
_SVG, _LINK = "{http://www.w3.org/2000/svg}", "{http://www.w3.org/1999/xlink}href"
#: In inches: so narrow that its letters can be read where it is as wide as a telephone.
_WIDTH, _LEFT, _RIGHT = 5.2, 0.115, 0.985
#: Of a letter, on average.
_LETTER = 0.06


def bars(block: Bars) -> str:
    """A bar per name, with its interval; "" where nothing can be drawn."""
    values = np.array(block.values, dtype=float)
    errors = None
    if block.low is not None and block.high is not None:
        ends = np.array([values - block.low, np.array(block.high) - values])
        errors = np.where(np.isfinite(ends), ends.clip(min=0), np.nan)
    said = [
        f"{name} {number(value) if value == value else 'no value'}" for name, value in zip(block.names, block.values)
    ]

    def draw(axis: Any) -> None:
        draw_bars(axis, values, block.names, unit=block.unit, errors=errors)
        axis.set_xlabel("")
        _level(axis, block.names)

    return _svg(f"bars of {len(values)} values", said, draw, 1.9, _below(block.names))


def steps(block: Steps) -> str:
    """A waterfall; "" where nothing can be drawn."""
    said = [f"start {number(block.start)}", *(f"{n} {number(v)}" for n, v in zip(block.names, block.values))]

    def draw(axis: Any) -> None:
        ends = block.start, block.end
        draw_steps(axis, block.values, block.names, *ends, unit=block.unit, less_is_better=block.less_is_better)
        _level(axis, [*block.names, "start", "end"])

    title = f"from {number(block.start)} to {number(block.end)} in {len(block.values)} steps"
    return _svg(title, [*said, f"end {number(block.end)}"], draw, 2.1, _below([*block.names, "start", "end"]))


def lines(block: Lines) -> str:
    """A line per name over the rounds, the names below; "" where nothing can be drawn."""
    values = np.array(block.values, dtype=float)
    if not np.isfinite(values).any():
        return ""
    said = []
    for name, line in zip(block.names, values.T):
        known = line[np.isfinite(line)]
        said.append(f"{name} from {number(known[0])} to {number(known[-1])}" if len(known) else f"{name} no value")

    def draw(axis: Any) -> None:
        draw_lines(axis, np.where(np.isfinite(values), values, np.nan), block.names, rounds=block.rounds)
        handles, labels = axis.get_legend_handles_labels()
        axis.figure.legend(handles, labels, loc="lower center", ncols=3, frameon=False, fontsize=9)

    names = len(block.names) if len(block.names) <= MOST_COLOURS else 2 * ENDS
    title = f"lines of {len(block.names)} over {len(block.rounds)} rounds"
    return _svg(title, said, draw, 2.1, 0.6 + 0.19 * math.ceil(names / 3))


def _fit(names: Sequence[str]) -> bool:
    """Whether names stand side by side under the bars without being turned."""
    return 1.5 * _LETTER * max(map(len, names), default=0) * len(names) < _WIDTH


def _below(names: Sequence[str]) -> float:
    return 0.25 + (0.0 if _fit(names) else _LETTER * min(24, max(map(len, names), default=0)))


def _level(axis: Any, names: Sequence[str]) -> None:
    for text in axis.get_xticklabels() if _fit(names) else ():
        text.set(rotation=0, horizontalalignment="center", rotation_mode="default")


def _svg(title: str, said: Sequence[str], draw: Callable[[Any], None], height: float, below: float) -> str:
    """What ``draw`` draws, with a title and, for those who do not see it, what it shows."""
    buffer, description = io.StringIO(), ", ".join(" ".join(text.split()) for text in said)
    # The same chart has the same bytes, whenever it is drawn; names are text that can be found and read out.
    with drawing(title), matplotlib.rc_context({"svg.hashsalt": description, "svg.fonttype": "none"}):
        figure = Figure(figsize=(_WIDTH, height + below))
        draw(figure.add_axes((_LEFT, below / (height + below), _RIGHT - _LEFT, 0.96 - below / (height + below))))
        figure.savefig(buffer, format="svg", transparent=True)
        return _inline(buffer.getvalue(), title, description)
    return ""


def _inline(text: str, title: str, description: str) -> str:
    """A file of Matplotlib's as an element of a page."""
    root = ElementTree.fromstring(text)
    for parent in list(root.iter()):
        for child in list(parent):
            if child.tag.rpartition("}")[2] in ("metadata", "style", "clipPath"):
                parent.remove(child)
    linked = {element.get(_LINK, "")[1:] for element in root.iter()}
    for element in root.iter():
        element.tag = element.tag.removeprefix(_SVG)
        element.attrib.pop("clip-path", None)
        if element.get("id") not in linked:
            element.attrib.pop("id", None)
        if (link := element.attrib.pop(_LINK, None)) is not None:
            element.set("xlink:href", link)
        for black, ink in _INK.items():
            element.set("style", element.get("style", "").replace(black, ink))
        if not element.get("style"):
            del element.attrib["style"]
    for place, (tag, said) in enumerate((("title", title), ("desc", description))):
        told = ElementTree.Element(tag)
        told.text = said
        root.insert(place, told)
    root.attrib = {"class": "chart", "role": "img", "viewBox": root.attrib["viewBox"]}
    return " ".join(ElementTree.tostring(root, encoding="unicode").split())
