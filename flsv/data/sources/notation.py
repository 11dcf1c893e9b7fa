"""Notations of numbers and dates in text files: decimal marks, thousands separators, date orders.

A cell whose meaning depends on the notation is never guessed: ``1.234`` among decimal commas may be 1234 or 1.234, and
``03/04/2024`` the third of April or the fourth of March.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

#: The known thousands separators; " " includes no-break spaces.
THOUSANDS = (".", ",", " ", "'")
_SPACES = re.compile("[\u00a0\u202f]")
#: A whole number with thousands separators.
_GROUPED = {
    mark: re.compile(rf"[-+]?[1-9]\d{{0,2}}({re.escape(mark)}\d{{3}})+") for mark in THOUSANDS
}
_NOTATIONS = [(mark, each) for mark in (".", ",") for each in (None, *THOUSANDS) if each != mark]
_BELOW_1000 = re.compile(r"[-+]?\d{1,3}")
_POINT = re.compile(r"[-+]?\d+\.\d+([eE][-+]?\d+)?")


def parsed(values: Iterable[Any], decimal: str = ".", thousands: str | None = None) -> np.ndarray:
    """Convert values to numbers, float64 ``[N]``, with NaN for what is not a number.

    With a decimal comma, a point that cannot separate thousands is read as decimal, too.
    """

    def number(value: Any) -> float:
        try:
            if not isinstance(value, str):
                return float(value)
            if "_" in value:  # Python reads 1_000 as a number, which is hardly meant in a table
                return np.nan
            if thousands is not None:
                head, mark, rest = (
                    _SPACES.sub(" ", value) if thousands == " " else value
                ).partition(decimal)
                if _GROUPED[thousands].fullmatch(head):
                    value = f"{head.replace(thousands, '')}{mark}{rest}"
            if decimal == "," and "." in value:
                return np.nan if "," in value or _GROUPED["."].fullmatch(value) else float(value)
            return float(value.replace(decimal, "."))
        except (TypeError, ValueError):
            return np.nan

    numbers = np.array([number(value) for value in values], dtype=np.float64)
    return np.where(np.isfinite(numbers), numbers, np.nan)


def column_numbers(
    values: Sequence[Any],
    decimal: str,
    thousands: str | None,
) -> np.ndarray:
    """Convert one file's column to numbers as :func:`parsed` does, unless a value contradicts a decimal comma."""
    texts = [value for value in values if isinstance(value, str)]
    if decimal == "," and any(map(_has_decimal_point, texts)):
        if any("," in text for text in texts):
            return parsed(values, ",")
        return parsed(values, ".")
    return parsed(values, decimal, thousands)


def _has_decimal_point(text: str) -> bool:
    """Return whether a text is a number with a point that cannot separate thousands."""
    return _POINT.fullmatch(text) is not None and not _GROUPED["."].fullmatch(text)


def ambiguous_point(texts: Iterable[str]) -> str | None:
    """Return a text of one file's column whose point may be decimal or separate thousands, or None.

    The point is ambiguous if all texts are whole numbers below 1,000 or have three digits after a point, and there are
    both.

    Example:
        >>> ambiguous_point(["25.548", "873"]), ambiguous_point(["25.548", "873", "0.5"])
        ('25.548', None)
    """
    distinct = set(texts)
    grouped = set(filter(_GROUPED["."].fullmatch, distinct))
    below_1000 = set(filter(_BELOW_1000.fullmatch, distinct))
    is_explained = distinct == grouped | below_1000
    if is_explained and grouped and below_1000:
        return max(grouped)
    return None


def other_notations(
    parts: Sequence[Sequence[str]], decimal: str, thousands: str | None
) -> tuple[list[str], list[dict[str, str]]]:
    """Find the texts that are numbers only in another notation, and the options of the notations that fit.

    Both lists are empty if most texts are words. Several notations are returned if they give different numbers.
    """
    read = [zip(texts, np.isnan(column_numbers(texts, decimal, thousands))) for texts in parts]
    like = sorted({text for pairs in read for text, unread in pairs if unread})
    words = {text for text in like if not _is_number(text)}
    like = [text for text in like if text not in words]
    if not like or 2 * len(words) > len(set().union(*parts)):
        return [], []
    numbers = [[text for text in texts if text not in words] for texts in parts]
    notations = _readings(numbers, decimal, thousands)
    if len(notations) == 1 and not _is_shown(numbers, {"decimal": decimal, **notations[0]}):
        return like, []  # of 12.500 and 0,5 alone, the first may be 12.5
    return like, notations


def _readings(
    parts: Sequence[Sequence[str]],
    decimal: str,
    thousands: str | None,
) -> list[dict[str, str]]:
    """Return the options of each notation in which all texts are numbers.

    Of notations that give equal numbers, only the first is returned.
    """
    options_by_numbers: dict[tuple[float, ...], dict[str, str]] = {}
    for mark, separator in _NOTATIONS:
        keeps_decimal = decimal in (".", mark)
        keeps_thousands = thousands in (None, separator)
        if not (keeps_decimal and keeps_thousands):
            continue

        options = {}
        if mark != decimal:
            options["decimal"] = mark
        if separator not in (None, thousands):
            options["thousands"] = separator
        if not options:
            continue

        numbers = [column_numbers(texts, mark, separator) for texts in parts]
        column = np.concatenate(numbers)
        if not np.isnan(column).any():
            options_by_numbers.setdefault(tuple(column), options)
    return list(options_by_numbers.values())


def _is_number(text: str) -> bool:
    """Return whether a text is a number in any notation."""
    return any(np.isfinite(parsed([text], *notation))[0] for notation in _NOTATIONS)


def _is_shown(parts: Sequence[Sequence[str]], options: Mapping[str, str]) -> bool:
    """Return whether the texts show that ``options["thousands"]``, if a point or comma, is a separator.

    A text shows this by two of them, or by one beside a decimal mark.
    """
    separator = options.get("thousands", " ")
    texts = [text for texts in parts for text in texts if separator in text]
    return separator not in (".", ",") or any(
        text.count(separator) > 1 or options["decimal"] in text for text in texts
    )


_ISO = re.compile(r"\d{4}-\d\d?-\d\d?([T ].*)?")
_DAY = re.compile(r"\d{1,2}([./-])\d{1,2}\1\d{4}((?: \d{1,2}:\d\d(?::\d\d)?)?)")
_TIMES = ("", " %H:%M", " %H:%M:%S")


def are_dates(texts: Iterable[str]) -> bool:
    """Return whether all texts look like dates with a four-digit year."""
    return all(_ISO.fullmatch(text) or _DAY.fullmatch(text) for text in texts)


def date_formats(parts: Iterable[Iterable[str]], known: Sequence[str] = ()) -> list[str] | None:
    """Return the ``strftime`` formats of dates that are not ISO 8601, given the texts of each file.

    Return None if a file does not show the order of day and month.
    """
    found: list[str] = []
    rest = [[text for text in texts if not _ISO.fullmatch(text)] for texts in parts]
    for mark in "./-":
        some = [
            [text for text in texts if text.lstrip("0123456789").startswith(mark)] for texts in rest
        ]
        orders = {_order(texts, mark, known) for texts in some if texts}
        if None in orders or len(orders) > 1:
            return None
        times = {text.count(":") for texts in some for text in texts}
        found += [
            f"{order}{time}"
            for order in orders
            for count, time in enumerate(_TIMES)
            if count in times
        ]
    return found


def _order(texts: Sequence[str], mark: str, known: Sequence[str]) -> str | None:
    """Return the only order of day, month and year, separated by ``mark``, that makes all texts dates.

    Return None if several orders fit, or ``known`` formats have another order.
    """
    orders = (
        [f"%d{mark}%m{mark}%Y"] if mark == "." else [f"%d{mark}%m{mark}%Y", f"%m{mark}%d{mark}%Y"]
    )
    column = pd.Series(texts, dtype=object)
    fitting = [
        each for each in orders if dated(column, [each + time for time in _TIMES]).notna().all()
    ]
    others = any(
        each.startswith(order) for each in known for order in orders if order not in fitting
    )
    return fitting[0] if len(fitting) == 1 and not others else None


def dated(texts: pd.Series, formats: Sequence[str]) -> pd.Series:
    """Convert texts to dates in UTC, with NaT for what is not a date or is ambiguous.

    A text is ambiguous if ``formats`` give different dates.
    """
    iso = texts.where(texts.isna() | texts.str.match(r"\d{4}-\d")) if formats else texts
    found = pd.to_datetime(iso, format="ISO8601", errors="coerce", utc=True)
    twice = found.isna() & False
    for each in formats:
        other = pd.to_datetime(texts, format=each, errors="coerce", utc=True)
        twice |= found.notna() & other.notna() & (found != other)
        found = found.fillna(other)
    return found.mask(twice)
