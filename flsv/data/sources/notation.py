"""Notations of numbers and dates in text files: decimal marks, thousands separators, orders of day, month and year.

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
_GROUPED = {mark: re.compile(rf"[-+]?[1-9]\d{{0,2}}({re.escape(mark)}\d{{3}})+") for mark in THOUSANDS}
_NOTATIONS = [(mark, each) for mark in (".", ",") for each in (None, *THOUSANDS) if each != mark]
_POINT = re.compile(r"[-+]?\d+\.\d+([eE][-+]?\d+)?")


def parsed(values: Iterable[Any], decimal: str = ".", thousands: str | None = None) -> np.ndarray:
    """Convert values to numbers, float64 ``[N]``; a value that is not a finite number becomes NaN.

    With a decimal comma, a point is read as a decimal mark, too, if it cannot be a thousands separator.

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
    """Convert the values of one file's column to numbers, as :func:`parsed` does, but correct ``decimal`` and
    ``thousands`` where the values contradict them.

    ``decimal=","``: if a value such as ``0.25`` has a point that cannot separate thousands, a column without commas is
    read with decimal points, and one with commas without thousands separators. ``thousands`` of ``"."`` or ``","``: it
    is used only if some value of the column also has a decimal mark or has the separator twice; with ``possible`` it is
    used without such a value, too.

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
    """Find the texts of a column that are numbers only in another notation than the present one, and the notations in
    which all numbers of the column can be read.

    Args:
        parts: the column's different texts in each file.
        decimal: the present decimal mark; only ``"."``, the default, may change.
        thousands: the present thousands separator; only None may change.

    Returns:
        First, the texts that are numbers only in another notation; an empty list if most texts are words. Second, a
        dictionary for each notation that fits all numbers of the column, with those of the options ``decimal`` and
        ``thousands`` that differ from the present ones. The list has several notations if they give different numbers.
        It is empty if no notation fits, or if the column does not show that the only fitting one is right.

    Example:
        >>> other_notations([["78"], ["1.234,5"]], ".", None), other_notations([["0.5", "high"]], ".", None)
        ((['1.234,5'], [{'decimal': ',', 'thousands': '.'}]), ([], []))
        >>> other_notations([["78.5", "1,234"]], ".", None)
        (['1,234'], [{'thousands': ','}, {'decimal': ','}])
    """
    like = sorted(_unread(parts, decimal, thousands))
    words = {text for text in like if not _is_number(text)}
    like = [text for text in like if text not in words]
    if not like or 2 * len(words) > len(set().union(*parts)):
        return [], []
    numbers = [[text for text in texts if text not in words] for texts in parts]
    notations = _readings(numbers, decimal, thousands)
    if len(notations) == 1 and not _is_shown(numbers, {"decimal": decimal, **notations[0]}):
        return like, []  # of 12.500 and 0,5 alone, the first may be 12.5
    return like, notations


def _readings(parts: Sequence[Sequence[str]], decimal: str, thousands: str | None) -> list[dict[str, str]]:
    """Return the notations in which all texts are numbers: for each a dictionary with those of the options ``decimal``
    and ``thousands`` that differ from the present ones.

    Of several notations that give the same numbers, only the first is returned.
    """
    found: dict[tuple[float, ...], dict[str, str]] = {}
    for mark, separator in _NOTATIONS:
        options = {} if mark == decimal else {"decimal": mark}
        options |= {} if separator in (None, thousands) else {"thousands": separator}
        if options and decimal in (".", mark) and thousands in (None, separator):
            numbers = np.concatenate([column_numbers(texts, mark, separator, possible=True) for texts in parts])
            if not np.isnan(numbers).any():
                found.setdefault(tuple(numbers), options)
    return list(found.values())


def _unread(parts: Sequence[Sequence[str]], decimal: str, thousands: str | None) -> set[str]:
    """Return the texts that are not numbers in the present notation."""
    read = [zip(texts, np.isnan(column_numbers(texts, decimal, thousands))) for texts in parts]
    return {text for pairs in read for text, unread in pairs if unread}


def _is_number(text: str) -> bool:
    """Return whether a text is a number in any notation."""
    return any(np.isfinite(parsed([text], *notation))[0] for notation in _NOTATIONS)


def _is_shown(parts: Sequence[Sequence[str]], options: Mapping[str, str]) -> bool:
    """Return whether one of the texts shows that the separator in ``options`` separates thousands: it has the separator
    twice, or the decimal mark as well. Separators other than a point or comma are always accepted."""
    separator = options.get("thousands", " ")
    texts = [text for texts in parts for text in texts if separator in text]
    return separator not in (".", ",") or any(text.count(separator) > 1 or options["decimal"] in text for text in texts)


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


def date_formats(parts: Iterable[Iterable[str]], known: Sequence[str] = ()) -> list[str] | None:
    """Return the formats, as for ``strftime``, in which texts that are not in ISO 8601 are dates.

    Args:
        parts: the texts of each file, for which :func:`are_dates` returns True.
        known: formats of other columns.

    Returns:
        The formats; None if a text is no date in any format, or if a file does not show the order of day and month, or
        shows another order than the others.

    Example:
        >>> date_formats([["2024-03-31", "31.3.2024", "1.4.2024 10:15"]])
        ['%d.%m.%Y', '%d.%m.%Y %H:%M']
        >>> date_formats([["03/04/2024", "03/31/2024"]]), date_formats([["03/04/2024"], ["03/31/2024"]])
        (['%m/%d/%Y'], None)
    """
    found: list[str] = []
    rest = [[text for text in texts if not _ISO.fullmatch(text)] for texts in parts]
    for mark in "./-":
        some = [[text for text in texts if text.lstrip("0123456789").startswith(mark)] for texts in rest]
        orders = {_order(texts, mark, known) for texts in some if texts}
        if None in orders or len(orders) > 1:
            return None
        times = {text.count(":") for texts in some for text in texts}
        found += [f"{order}{time}" for order in orders for count, time in enumerate(_TIMES) if count in times]
    return found


def _order(texts: Sequence[str], mark: str, known: Sequence[str]) -> str | None:
    """Return the order of day, month and year in which all texts are dates, as a format such as ``"%d/%m/%Y"``.

    Return None if no order fits, if several fit, or if a format in ``known`` has an order that does not fit.

    Args:
        texts: the dates, with or without a time.
        mark: the character between day, month and year.
        known: formats of other columns.
    """
    orders = [f"%d{mark}%m{mark}%Y"] if mark == "." else [f"%d{mark}%m{mark}%Y", f"%m{mark}%d{mark}%Y"]
    column = pd.Series(texts, dtype=object)
    fitting = [each for each in orders if dated(column, [each + time for time in _TIMES]).notna().all()]
    others = any(each.startswith(order) for each in known for order in orders if order not in fitting)
    return fitting[0] if len(fitting) == 1 and not others else None


def dated(texts: pd.Series, formats: Sequence[str]) -> pd.Series:
    """Convert texts to dates in UTC; a text becomes NaT if it is no date, or different dates in different formats.

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
