"""Notations of numbers and dates in text files: decimal marks, thousands separators, orders of day, month and year.

A cell whose meaning depends on the notation is never guessed: ``1.234`` among decimal commas may be 1234 or 1.234, and
``03/04/2024`` the third of April or the fourth of March.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pandas as pd

#: Thousands separators that are known; " " also stands for the no-break spaces.
THOUSANDS = (".", ",", " ", "'")
_SPACES = re.compile("[\u00a0\u202f]")
#: A whole number with thousands separators.
_GROUPED = {mark: re.compile(rf"[-+]?[1-9]\d{{0,2}}({re.escape(mark)}\d{{3}})+") for mark in THOUSANDS}
_POINT = re.compile(r"[-+]?\d+\.\d+([eE][-+]?\d+)?")


def parsed(values: Iterable[Any], decimal: str = ".", thousands: str | None = None) -> np.ndarray:
    """Convert values to numbers, float64 ``[N]``; a value that is not a finite number becomes NaN.

    Among decimal commas, a decimal point is read if it cannot be a thousands separator.

    Args:
        values: numbers or texts.
        decimal: decimal mark, ``"."`` or ``","``.
        thousands: thousands separator; None: numbers have none.

    Example:
        >>> parsed(["3", "-1e3", "high", "1_000", "inf", None])
        array([    3., -1000.,    nan,    nan,    nan,    nan])
        >>> parsed(["3", "3,5", "3.5", "3.500", "1.003,5"], ",")
        array([3. , 3.5, 3.5, nan, nan])
        >>> parsed(["3.500", "1.003,5", "3.5"], ",", ".")
        array([3500. , 1003.5,    3.5])
    """

    def number(value: Any) -> float:
        try:
            if not isinstance(value, str):
                return float(value)
            if "_" in value:  # Python reads 1_000 as a number, which is hardly meant in a table
                return np.nan
            if thousands is not None:
                head, mark, rest = (_SPACES.sub(" ", value) if thousands == " " else value).partition(decimal)
                if _GROUPED[thousands].fullmatch(head):
                    value = f"{head.replace(thousands, '')}{mark}{rest}"
            if decimal == "," and "." in value:
                return np.nan if "," in value or _GROUPED["."].fullmatch(value) else float(value)
            return float(value.replace(decimal, "."))
        except (TypeError, ValueError):
            return np.nan

    numbers = np.array([number(value) for value in values], dtype=np.float64)
    return np.where(np.isfinite(numbers), numbers, np.nan)


def column_numbers(values: Sequence[Any], decimal: str, thousands: str | None, possible: bool = False) -> np.ndarray:
    """Convert the values of a column of one file to numbers, as :func:`parsed` does, but by what the column shows.

    With ``decimal=","``, a column without a comma, but with numbers such as ``0.25``, has decimal points, and one with
    commas and such numbers has no thousands separators. A point or comma separates thousands only if the column also
    has a decimal mark, or a number with two separators; with ``possible``, also if it may do so.

    Example:
        >>> column_numbers(["1.250", "0.25"], ",", "."), column_numbers(["1.250", "80,5"], ",", ".")
        (array([1.25, 0.25]), array([1250. ,   80.5]))
        >>> column_numbers(["1.250", "80"], ",", ".")
        array([nan, 80.])
    """
    texts = [value for value in values if isinstance(value, str)]
    if decimal == "," and any(map(_is_point, texts)):
        return parsed(values, *((",", None) if any("," in text for text in texts) else (".", None)))
    if thousands in (".", ",") and not possible:
        thousands = thousands if any(decimal in text or text.count(thousands) > 1 for text in texts) else None
    return parsed(values, decimal, thousands)


def _is_point(text: str) -> bool:
    """Return whether a text is a number with a decimal point that cannot be a thousands separator."""
    return bool(_POINT.fullmatch(text)) and not _GROUPED["."].fullmatch(text)


def other_notations(
    parts: Sequence[Sequence[str]], decimal: str, thousands: str | None
) -> tuple[list[str], list[dict[str, str]]]:
    """Find the notations in which texts are numbers that are not numbers in the present notation.

    Args:
        parts: the column's different texts in each file.
        decimal: the present decimal mark; only ``"."``, the default, may change.
        thousands: the present thousands separator; only None may change.

    Returns:
        The texts that are numbers in another notation only (none if most texts are words), and the options ``decimal``
        and ``thousands`` of each notation in which all numbers of the column can be read: several if they are different
        numbers in different notations, none if there is no such notation.

    Example:
        >>> other_notations([["78"], ["1.234,5"]], ".", None), other_notations([["0.5", "high"]], ".", None)
        ((['1.234,5'], [{'decimal': ',', 'thousands': '.'}]), ([], []))
        >>> other_notations([["78.5", "1,234"]], ".", None)
        (['1,234'], [{'thousands': ','}, {'decimal': ','}])
    """
    unread = {
        text
        for texts in parts
        for text, number in zip(texts, column_numbers(texts, decimal, thousands).tolist())
        if number != number
    }
    every = [(mark, each) for mark in (".", ",") for each in (None, *THOUSANDS) if each != mark]
    like = {text for text in unread if any(parsed([text], *each)[0] == parsed([text], *each)[0] for each in every)}
    words = unread - like
    if not like or 2 * len(words) > len(set().union(*parts)):
        return [], []
    numbers = [[text for text in texts if text not in words] for texts in parts]
    found: dict[tuple[float, ...], dict[str, str]] = {}
    for mark, separator in every:
        options = {"decimal": mark} if mark != decimal else {}
        options |= {"thousands": separator} if separator is not None and separator != thousands else {}
        if decimal in (".", mark) and thousands in (None, separator) and options:
            read = np.concatenate([column_numbers(texts, mark, separator, possible=True) for texts in numbers])
            if not np.isnan(read).any():
                found.setdefault(tuple(read), options)
    options = next(iter(found.values()), {})
    separator, mark = options.get("thousands", ""), options.get("decimal", decimal)
    if len(found) == 1 and separator in (".", ","):
        # Of 12.500 and 0,5 alone, the first may be 12.5.
        shown = any(text.count(separator) > 1 or {separator, mark} <= set(text) for texts in numbers for text in texts)
        return sorted(like), list(found.values()) if shown else []
    return sorted(like), list(found.values())


_ISO = re.compile(r"\d{4}-\d\d?-\d\d?([T ].*)?")
_DAY = re.compile(r"\d{1,2}([./-])\d{1,2}\1\d{4}((?: \d{1,2}:\d\d(?::\d\d)?)?)")
_TIMES = ("", " %H:%M", " %H:%M:%S")


def are_dates(texts: Iterable[str]) -> bool:
    """Return whether all texts look like dates with a year of four digits.

    Example:
        >>> are_dates(["2024-03-31", "31.3.2024", "31/03/2024 10:15"]), are_dates(["31.3.2024", "unknown"])
        (True, False)
    """
    return all(_ISO.fullmatch(text) or _DAY.fullmatch(text) for text in texts)


def date_formats(texts: Iterable[str], known: Sequence[str] = ()) -> list[str] | None:
    """Return the formats, as for ``strftime``, in which texts that are not in ISO 8601 are dates.

    Args:
        texts: texts that :func:`are_dates`.
        known: formats of other columns.

    Returns:
        The formats; None if a text is no date in any format, or if the order of day and month is not known.

    Example:
        >>> date_formats(["2024-03-31", "31.3.2024", "1.4.2024 10:15"])
        ['%d.%m.%Y', '%d.%m.%Y %H:%M']
        >>> date_formats(["03/04/2024"]), date_formats(["03/04/2024", "03/31/2024"])
        (None, ['%m/%d/%Y'])
    """
    found = []
    rest = {text: match for text in texts if not _ISO.fullmatch(text) and (match := _DAY.fullmatch(text))}
    for mark in dict.fromkeys(match[1] for match in rest.values()):
        some = pd.Series([text for text, match in rest.items() if match[1] == mark])
        orders = [f"%d{mark}%m{mark}%Y"] if mark == "." else [f"%d{mark}%m{mark}%Y", f"%m{mark}%d{mark}%Y"]
        orders = [order for order in orders if dated(some, [order + time for time in _TIMES]).notna().all()]
        if len(orders) != 1 or any(order != orders[0] and mark in order for order in (each[:8] for each in known)):
            return None
        colons = {rest[text][2].count(":") for text in some}
        found += [orders[0] + time for count, time in enumerate(_TIMES) if count in colons]
    return found


def dated(texts: pd.Series, formats: Sequence[str]) -> pd.Series:
    """Convert texts to dates in UTC; a text that is no date becomes NaT, as one that is another date in another format.

    Args:
        texts: texts and NaN.
        formats: formats as for ``strftime``, besides ISO 8601.
    """
    iso = texts.where(texts.isna() | texts.str.match(r"\d{4}-\d")) if formats else texts
    found = pd.to_datetime(iso, format="ISO8601", errors="coerce", utc=True)
    twice = found.isna() & False
    for each in formats:
        other = pd.to_datetime(texts, format=each, errors="coerce", utc=True)
        twice |= found.notna() & other.notna() & (found != other)
        found = found.fillna(other)
    return found.mask(twice)
