"""Functions that format numbers, names and sentences for the report, the terminal and Markdown."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from flsv.utilities.display import CLIENTS

NONE = "\N{EN DASH}"
#: Gain below which much more of a payment went to the wrong clients in trials.
SMALL = 0.15
#: Classes of the metrics whose values were closest to those by retraining in the benchmark, the closest first.
NEAREST = ("ShadowShapley", "BlendedContribution")
#: The sentences of a report.
WORDS: Mapping[str, Any] = yaml.safe_load(
    (Path(__file__).parent / "words.yaml").read_text(encoding="utf-8")
)


def number(value: float, digits: int = 3) -> str:
    """Format a number: integers without decimals, others with at least ``digits`` significant digits, NaN as a dash.

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
    """Format a column of numbers with equally many decimals, enough for ``digits`` significant digits of the largest.

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


def with_intervals(
    values: Sequence[float], low: Sequence[float], high: Sequence[float], between: str = ", "
) -> list[str]:
    """Format values with their intervals in brackets, all with equally many decimals.

    Example:
        >>> with_intervals([0.5, 1.0], [0.25, float("nan")], [0.75, float("nan")])
        ['0.50 [0.25, 0.75]', '1.00']
    """
    count = len(values)
    texts = numbers([*values, *low, *high])
    cells = zip(texts[:count], texts[count : 2 * count], texts[2 * count :])
    return [
        value if NONE in (value, least, most) else f"{value} [{least}{between}{most}]"
        for value, least, most in cells
    ]


def ends_of(order: Sequence[int], most: int, ends: int = 10) -> list[int]:
    """Return ``order`` if it has up to ``most`` elements, or else its first and last ``ends`` elements."""
    return [*order] if len(order) <= most else [*order[:ends], *order[-ends:]]


def by_value(values: Sequence[float]) -> list[int]:
    """Return the indices of the values, sorted from the highest to the lowest value, then NaN."""
    places = range(len(values))
    return sorted(
        places,
        key=lambda i: (values[i] != values[i], -values[i] if values[i] == values[i] else 0.0, i),
    )


def nearest_first(classes: Mapping[str, str]) -> list[str]:
    """Sort metrics' names, given as ``{name: class}``, metrics closest to retraining first, see :data:`NEAREST`.

    Example:
        >>> nearest_first({"sv": "CumulativeShapley", "value": "ShadowShapley"})
        ['value', 'sv']
    """
    return sorted(classes, key=lambda name: (*NEAREST, classes[name]).index(classes[name]))


def shares_in(values: Sequence[float]) -> list[float]:
    """Convert values to shares: divide by the sum of the values above 0. Values below 0 become 0, NaN stays NaN.

    Example:
        >>> shares_in([3.0, 1.0, -2.0, float("nan")])
        [0.75, 0.25, 0.0, nan]
    """
    total = sum(max(value, 0.0) for value in values if value == value)
    return [
        max(value, 0.0) / total if total > 0 and value == value else math.nan for value in values
    ]


def titled(by: str) -> str:
    """Return a title for a performance measure, given as ``name`` or ``name of class``.

    Example:
        >>> titled("average_precision of yes")
        'average precision of yes'
    """
    name, of, positive = by.partition(" of ")
    return f"{WORDS['titles'].get(name, name)}{of}{positive}"


def performance(by: str, value: float) -> str:
    """Format a model's performance ``by`` a measure: accuracies in percent, a negative loss as the positive loss.

    Example:
        >>> performance("balanced_accuracy", 0.0898), performance("negative_loss", -2.25)
        ('9.0 %', '2.25')
    """
    return (
        percent(value)
        if by.endswith("accuracy")
        else number(abs(value) if by == "negative_loss" else value)
    )


def change(game: Mapping[str, Any]) -> str:
    """Describe how a performance, an entry of ``paid_in`` in ``run.json``, changed over the run.

    Example:
        >>> change({"by": "accuracy", "start": 0.1, "end": 0.9, "majority": 0.25})
        'accuracy on the validation set: from 10.0 % to 90.0 % (the most frequent class alone: 25.0 %)'
        >>> change({"by": "negative_loss", "start": None, "end": -0.5})
        'loss on the validation set: from – to 0.500'
    """
    by, majority = game["by"], game.get("majority")
    where = "" if by.startswith(CLIENTS) else " on the validation set"
    first, last = (NONE if game[x] is None else performance(by, game[x]) for x in ("start", "end"))
    beside = "" if majority is None else f" (the most frequent class alone: {percent(majority)})"
    return f"{titled(by)}{where}: from {first} to {last}{beside}"


def is_small_gain(by: str, values: Iterable[float]) -> bool:
    """Return whether values add up to less than 0.15, for a score ``by`` that goes from 0 to 1.

    Example:
        >>> is_small_gain("accuracy", [0.1]), is_small_gain("negative_loss", [0.1])
        (True, False)
    """
    name = by.removeprefix(CLIENTS).partition(" of ")[0]
    to_one = name == "accuracy" or (name in WORDS["titles"] and name != "negative_loss")
    return to_one and math.fsum(value for value in values if value == value) < SMALL


def known_mean(values: Iterable[float]) -> float:
    """Compute the mean of the values that are not NaN, or NaN if there are none.

    Example:
        >>> known_mean([0.5, 1.0, float("nan")])
        0.75
    """
    known = [value for value in values if value == value]
    return statistics.fmean(known) if known else math.nan


def percent(share: float) -> str:
    """Format a fraction in percent.

    Example:
        >>> percent(0.1234), percent(float("nan"))
        ('12.3 %', '–')
    """
    return NONE if share != share else f"{100 * share:.1f} %"


def joined(names: Iterable[str], word: str = "and") -> str:
    """Join names with commas and, before the last, ``word``.

    Example:
        >>> joined(["Boston", "Lyon", "Osaka"]), joined(["Boston", "Lyon"], "or"), joined(["Boston"]), joined([])
        ('Boston, Lyon and Osaka', 'Boston or Lyon', 'Boston', '')
    """
    *first, last = [*names] or [""]
    return f"{', '.join(first)} {word} {last}" if first else last
