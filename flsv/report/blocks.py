"""Building blocks of a report, and how numbers and names are written in it."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

NONE = "\N{EN DASH}"


@dataclass(frozen=True)
class Text:
    """A paragraph of plain text."""

    text: str


@dataclass(frozen=True)
class Warning:
    """A paragraph that nobody may overlook."""

    text: str


@dataclass(frozen=True)
class Bullets:
    """A list of plain texts."""

    items: Sequence[str]


@dataclass(frozen=True)
class Table:
    """Cells as they are shown; the first column is text, the others stand to the right unless ``texts``. The caption
    stays with it, on paper, too."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    texts: bool = False
    caption: str = ""


@dataclass(frozen=True)
class Bars:
    """A value per name, with an interval where there is one: a chart; ``values``, ``low`` and ``high`` ``[k]``."""

    names: Sequence[str]
    values: Sequence[float]
    low: Sequence[float] | None = None
    high: Sequence[float] | None = None
    caption: str = ""
    unit: str = ""


@dataclass(frozen=True)
class Steps:
    """From ``start`` by a value per name to ``end``, to which they add up: a waterfall. ``less_is_better``: of an
    error, say, which shrinks."""

    names: Sequence[str]
    values: Sequence[float]
    start: float
    end: float
    caption: str = ""
    unit: str = ""
    less_is_better: bool = False


@dataclass(frozen=True)
class Lines:
    """Values ``[r][k]`` of k names in r ``rounds``, ascending: a chart."""

    names: Sequence[str]
    values: Sequence[Sequence[float]]
    rounds: Sequence[int]
    caption: str = ""


@dataclass(frozen=True)
class Heat:
    """Values ``[k][M]``, coloured about 0."""

    names: Sequence[str]
    columns: Sequence[str]
    values: Sequence[Sequence[float]]
    corner: str = "client"
    caption: str = ""
    scale: float | None = None

    @cached_property
    def bound(self) -> float:
        """What the strongest colour stands for: the largest value without its sign."""
        return self.scale or max((abs(x) for row in self.values for x in row if math.isfinite(x)), default=0.0) or 1.0


@dataclass(frozen=True)
class Code:
    """Lines to be copied."""

    text: str


Block = Text | Warning | Bullets | Table | Bars | Steps | Lines | Heat | Code


@dataclass(frozen=True)
class Section:
    """A title and its content."""

    title: str
    blocks: Sequence[Block]


@dataclass(frozen=True)
class Page:
    """A report: what everybody reads, and what it rests on."""

    title: str
    subtitle: str
    sections: Sequence[Section]
    appendix: Sequence[Section] = ()


def number(value: float, digits: int = 3) -> str:
    """A number as it is read: whole ones whole, others with three significant digits.

    Example:
        >>> [number(x) for x in (0.12345, 3.0, 1234.5678, -0.00001234, float("nan"))]
        ['0.123', '3', '1235', '-1.23e-05', '–']
    """
    if value != value:
        return NONE
    if math.isinf(value):
        return "inf" if value > 0 else "-inf"
    if value == int(value) and abs(value) < 1e15:
        return str(int(value))
    if abs(value) < 1e-4:
        return f"{value:.{digits - 1}e}"
    places = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    return f"{value:.{places}f}"


def numbers(values: Sequence[float], digits: int = 3) -> list[str]:
    """A column of numbers with the same decimals: as many as give the largest ``digits`` significant ones.

    Example:
        >>> numbers([1.3123, -0.0772, float("nan"), 0.5])
        ['1.31', '-0.08', '–', '0.50']
        >>> numbers([12.0, 3.0])
        ['12', '3']
    """
    known = [abs(value) for value in values if math.isfinite(value)]
    largest = max(known, default=0.0)
    if not largest or largest < 1e-4 or all(value == int(value) for value in known):
        return [number(value, digits) for value in values]
    places = max(0, digits - 1 - math.floor(math.log10(largest)))
    return [f"{value:.{places}f}" if math.isfinite(value) else number(value) for value in values]


def percent(share: float) -> str:
    """A share as it is read.

    Example:
        >>> percent(0.1234), percent(float("nan"))
        ('12.3 %', '–')
    """
    return NONE if share != share else f"{100 * share:.1f} %"


def plain(text: str) -> str:
    """A text on one line that Markdown shows as it is.

    Example:
        >>> print(plain("a|b *c*"), plain("<b>"))
        a\\|b \\*c\\* &lt;b&gt;
    """
    text = " ".join(text.split()).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"([\\`*_|\[\]])", r"\\\1", text)


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Cells, in Markdown already, as a table.

    Example:
        >>> print(markdown_table(["a", "b"], [["1", "2"]]))
        | a | b |
        | --- | --- |
        | 1 | 2 |
    """
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def joined(names: Iterable[str], word: str = "and") -> str:
    """Names as they are said.

    Example:
        >>> joined(["Boston", "Lyon", "Osaka"]), joined(["Boston", "Lyon"], "or"), joined(["Boston"])
        ('Boston, Lyon and Osaka', 'Boston or Lyon', 'Boston')
    """
    *first, last = names
    return f"{', '.join(first)} {word} {last}" if first else last
