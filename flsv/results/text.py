"""Formatting of numbers, names and sentences for the report's page, the terminal and Markdown."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from flsv.utilities.display import CLIENTS

NONE = "\N{EN DASH}"
#: Largest number of clients that are named one by one.
FEW = 3
#: Gain below which much more of a payment went to the wrong clients in trials.
SMALL = 0.15
#: Classes of the metrics whose values were closest to those by retraining in the benchmark, the closest first.
NEAREST = ("ShadowShapley", "BlendedContribution")
#: The sentences of a report.
WORDS: Mapping[str, Any] = yaml.safe_load((Path(__file__).parent / "words.yaml").read_text(encoding="utf-8"))


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
    """Format a column of numbers with as many decimals as the largest needs for ``digits`` significant digits.

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
        value if NONE in (value, least, most) else f"{value} [{least}{between}{most}]" for value, least, most in cells
    ]


def ends_of(order: Sequence[int], most: int, ends: int = 10) -> list[int]:
    """Return the whole sequence if it has at most ``most`` elements; else its first and last ``ends`` elements."""
    return [*order] if len(order) <= most else [*order[:ends], *order[-ends:]]


def by_value(values: Sequence[float]) -> list[int]:
    """Return the indices of the values, sorted by value, the highest first and NaN last."""
    places = range(len(values))
    return sorted(places, key=lambda i: (values[i] != values[i], -values[i] if values[i] == values[i] else 0.0, i))


def nearest_first(classes: Mapping[str, str]) -> list[str]:
    """Return the names of ``{metric: class}``, those nearest to retraining first, see :data:`NEAREST`.

    Example:
        >>> nearest_first({"sv": "CumulativeShapley", "value": "ShadowShapley"})
        ['value', 'sv']
    """
    return sorted(classes, key=lambda name: (*NEAREST, classes[name]).index(classes[name]))


def ranking(
    names: Sequence[str],
    ends: tuple[Sequence[float], Sequence[float], Sequence[float]],
    metric: str,
) -> list[str]:
    """Return a sentence on who contributed most and least by ``ends [3][n]``; overlapping intervals go together.

    Example:
        >>> ends = [0.5, 0.6, 0.1], [0.4, 0.5, 0.0], [0.6, 0.7, 0.2]
        >>> ranking(["Genève", "Zürich", "Bern"], ends, "sv")
        ['By sv, Zürich or Genève contributed most, Bern least.']
    """
    values, low, high = ends
    order, shown = [i for i in by_value(values) if values[i] == values[i]], numbers(values)
    if len({shown[i] for i in order}) < 2:
        return [f"By {metric}, all clients contributed the same."] if len(order) > 1 else []
    first, last = order[0], order[-1]
    if low[first] <= high[last]:
        return [f"By {metric}, no client contributed clearly more than another: all brackets overlap."]
    most = [i for i in order if high[i] >= low[first] or shown[i] == shown[first]]
    least = [i for i in order[::-1] if low[i] <= high[last] or shown[i] == shown[last]]
    if {*most} & {*least}:
        return [
            f"By {metric}, {names[first]} contributed clearly more than {names[last]}. Other brackets overlap both."
        ]
    both = (_not_distinguished(names, clients, shown) for clients in (most, least))
    return ["By {}, {} contributed most, {} least.".format(metric, *both)]


def _not_distinguished(names: Sequence[str], clients: Sequence[int], shown: Sequence[str]) -> str:
    """Return the names of clients that may all be the highest (or lowest), or their number if they are many."""
    word = "and" if len({shown[i] for i in clients}) == 1 else "or"
    if len(clients) <= FEW:
        return joined((names[i] for i in (sorted(clients) if word == "and" else clients)), word)
    return f"{len(clients)} clients equally" if word == "and" else f"one of {len(clients)} clients"


def shares_in(values: Sequence[float]) -> list[float]:
    """Divide each value by the sum of the values above 0; below 0 it is 0, NaN stays NaN.

    Example:
        >>> shares_in([3.0, 1.0, -2.0, float("nan")])
        [0.75, 0.25, 0.0, nan]
    """
    total = sum(max(value, 0.0) for value in values if value == value)
    return [max(value, 0.0) / total if total > 0 and value == value else math.nan for value in values]


def paid(values: Sequence[float]) -> list[str]:
    """Return the shares of :func:`shares_in` in percent."""
    return [percent(share) for share in shares_in(values)]


def titled(by: str, words: str = "titles") -> str:
    """Return a performance's name (``name of class``) in the words of the section ``words`` of ``words.yaml``.

    Example:
        >>> titled("average_precision of yes"), titled("negative_loss", "plain")
        ('average precision of yes', 'error')
    """
    name, of, positive = by.partition(" of ")
    return f"{WORDS[words].get(name, name)}{of}{positive}"


def performance(by: str, value: float) -> str:
    """Format a performance: accuracies in percent, a negative loss as the positive loss.

    Example:
        >>> performance("balanced_accuracy", 0.0898), performance("negative_loss", -2.25)
        ('9.0 %', '2.25')
    """
    return percent(value) if by.endswith("accuracy") else number(abs(value) if by == "negative_loss" else value)


def change(by: str, start: float | None, end: float | None) -> str:
    """Return a text on how a performance on the validation set has changed from ``start`` to ``end``.

    Example:
        >>> change("negative_loss", -2.25, -0.5), change("val_f1", None, 0.5)
        ('loss on the validation set fell from 2.25 to 0.500', 'val_f1 on the validation set is 0.500')
    """
    title = titled(by)
    where = "" if by.startswith(CLIENTS) else " on the validation set"
    first, last = (NONE if value is None else performance(by, value) for value in (start, end))
    if start is None or end is None:
        return f"{title}{where} is {last}"
    rise = abs(end) - abs(start) if by == "negative_loss" else end - start
    if not rise:
        return f"{title}{where} stayed at {last}"
    verb = "rose" if rise > 0 else "fell"
    return f"{title}{where} {verb} from {first} to {last}"


def beside(game: Mapping[str, Any]) -> str:
    """Return what to add to a performance: the score of the most frequent class alone; "" if it is not known."""
    majority = game.get("majority")
    return "" if majority is None else f" (the most frequent class alone: {percent(majority)})"


def gain(by: str, value: float, whole: float = math.nan) -> str:
    """Return a text on how much a client has changed a performance: by ``value`` and, if known, out of the change
    ``whole`` by all clients together.

    Example:
        >>> gain("accuracy", 0.0614, 0.8264), gain("auroc", -0.01, 0.5)
        ('raised the accuracy by 6.14 of 83 points', "worsened the model's AUROC by 0.0100")
    """
    points = by.endswith("accuracy")
    scale, verbs = (
        (100, ("raised the", "lowered the")) if points else (1, ("improved the model's", "worsened the model's"))
    )
    of = f" of {number(float(f'{scale * whole:.1e}'))}" if value >= 0 and whole > 0 else ""
    amount = f"{number(abs(scale * value))}{of}{' points' if points else ''}"
    return f"{verbs[value < 0]} {titled(by)} by {amount}"


def small_gain(by: str, gain: float) -> list[str]:
    """Return a list with the sentence on payments by values that sum to ``gain``, if that is small and the score ``by``
    goes from 0 to 1; else an empty list.

    Example:
        >>> len(small_gain("accuracy", 0.1)), small_gain("accuracy", 0.5), small_gain("negative_loss", 0.1)
        (1, [], [])
    """
    name = by.removeprefix(CLIENTS).partition(" of ")[0]
    to_one = name in WORDS["plain"] and name != "negative_loss"
    return [WORDS["small_gain"]] if to_one and gain < SMALL else []


def known_mean(values: Iterable[float]) -> float:
    """Compute the mean of the values that are not NaN; NaN if there are none.

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
    """Return names joined with commas and, before the last, ``word``.

    Example:
        >>> joined(["Boston", "Lyon", "Osaka"]), joined(["Boston", "Lyon"], "or"), joined(["Boston"]), joined([])
        ('Boston, Lyon and Osaka', 'Boston or Lyon', 'Boston', '')
    """
    *first, last = [*names] or [""]
    return f"{', '.join(first)} {word} {last}" if first else last
