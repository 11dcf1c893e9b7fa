"""Building blocks of a report, independent of its format."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

NONE = "\N{EN DASH}"


@dataclass(frozen=True)
class Text:
    """A paragraph of plain text."""

    text: str


@dataclass(frozen=True)
class Bullets:
    """A list of plain texts."""

    items: Sequence[str]


@dataclass(frozen=True)
class Table:
    """Cells as they are shown; the first column is text, the others stand to the right unless ``texts``."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    texts: bool = False


@dataclass(frozen=True)
class Bars:
    """A value per name, with an interval where there is one: a chart; ``values``, ``low`` and ``high`` ``[k]``."""

    names: Sequence[str]
    values: Sequence[float]
    low: Sequence[float] | None = None
    high: Sequence[float] | None = None


@dataclass(frozen=True)
class Lines:
    """Values ``[r][k]`` of k names in r rounds: a chart, and the values of some rounds where there are no charts.
    ``rounds``, ascending, are their numbers; None: from 0."""

    names: Sequence[str]
    values: Sequence[Sequence[float]]
    rounds: Sequence[int] | None = None

    @property
    def numbers(self) -> Sequence[int]:
        """Of the rounds."""
        return range(len(self.values)) if self.rounds is None else self.rounds


@dataclass(frozen=True)
class Heat:
    """Values ``[k][M]``, coloured about 0."""

    names: Sequence[str]
    columns: Sequence[str]
    values: Sequence[Sequence[float]]
    corner: str = "client"

    @cached_property
    def bound(self) -> float:
        """The largest value without its sign."""
        return max((abs(x) for row in self.values for x in row if math.isfinite(x)), default=0.0) or 1.0


@dataclass(frozen=True)
class Code:
    """Lines to be copied."""

    text: str


Block = Text | Bullets | Table | Bars | Lines | Heat | Code


@dataclass(frozen=True)
class Section:
    """A title and its content."""

    title: str
    blocks: Sequence[Block]


@dataclass(frozen=True)
class Page:
    """A report."""

    title: str
    subtitle: str
    sections: Sequence[Section]


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


def mean(values: Sequence[float]) -> float:
    """Of the known ones; NaN without any."""
    known = [value for value in values if value == value]
    return math.fsum(known) / len(known) if known else math.nan
