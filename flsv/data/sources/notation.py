"""Notations of numbers and dates in text files: decimal marks, thousands separators, date orders.

A cell whose meaning depends on the notation is never guessed: ``1.234`` among decimal commas may be 1234 or 1.234, and
``03/04/2024`` the third of April or the fourth of March.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, ClassVar, Literal

import numpy as np
import pandas as pd

from flsv.utilities.declared import Rules, checked

#: The known thousands separators; " " includes no-break spaces.
THOUSANDS = (".", ",", " ", "'")
_SPACES = re.compile("[\u00a0\u202f]")
#: A whole number with thousands separators, by the separator.
_GROUPED_DIGITS = {
    mark: re.compile(rf"[-+]?[1-9]\d{{0,2}}({re.escape(mark)}\d{{3}})+") for mark in THOUSANDS
}
#: A number by any decimal mark and thousands separator.
NUMBER_IN_ANY_NOTATION = re.compile(
    r"[-+]?(\d+|[1-9]\d{0,2}([., '\u00a0\u202f]\d{3})+)([.,]\d+)?([eE][-+]?\d+)?"
)


@checked
@dataclass(frozen=True)
class TextFormat:
    """How a text file is written, in the words of ``pandas.read_csv``. Without ``sep`` the header shows it."""

    rules: ClassVar[Rules] = (
        (lambda a: a.thousands != a.decimal, "a mark cannot separate both thousands and decimals."),
        (lambda a: a.sep is None or len(a.sep.encode()) == 1, "sep is one ASCII character."),
    )

    decimal: Literal[".", ","] = "."
    thousands: Literal[".", ",", " ", "'"] | None = None
    encoding: str | None = None
    sep: str | None = None

    @property
    def states_notation(self) -> bool:
        """Whether it is said how the file writes numbers."""
        return self.decimal != "." or self.thousands is not None


_WHOLE_BELOW_1000 = re.compile(r"[-+]?\d{1,3}")
#: A zero that a number would lose, at the start of a text.
LEADING_ZERO = re.compile(r"[-+]?0\d")
#: What is said of words in a column of numbers that are no category of their own.
TWO_WRITINGS = "two codings of one thing, or a unit? Write the same at all sites, or name categories (categorical)."


def parse_numbers(
    values: Iterable[Any],
    decimal: str = ".",
    thousands: str | None = None,
) -> np.ndarray:
    """Convert values to numbers, float64 ``[N]``, with NaN for what is not a number."""
    values = list(values)
    texts = {value for value in values if isinstance(value, str)}
    is_plain = decimal == "." and thousands is None and "_" not in "".join(texts)
    numbers = _converted_at_once(values) if is_plain else None
    if numbers is None:
        converted = [_number(value, decimal, thousands) for value in values]
        numbers = np.array(converted, dtype=np.float64)
    return np.where(np.isfinite(numbers), numbers, np.nan)


def _converted_at_once(values: list[Any]) -> np.ndarray | None:
    """Convert values as ``float`` does each, or return None if one is not a number."""
    array = np.empty(len(values), dtype=object)
    array[:] = values
    try:
        return array.astype(np.float64)
    except (TypeError, ValueError):
        return None


def _number(
    value: Any,
    decimal: str,
    thousands: str | None,
) -> float:
    """Convert a value to a number, or return NaN."""
    if isinstance(value, str):
        value = _plain_text(value, decimal, thousands)
    try:
        return float(value)
    except (TypeError, ValueError):
        return np.nan


def _plain_text(
    text: str,
    decimal: str,
    thousands: str | None,
) -> str:
    """Write a number as ``float`` reads it, and anything else as it does not."""
    if "_" in text:  # Python reads 1_000 as a number, which is hardly meant in a table
        return ""
    if thousands is not None:
        text = _without_separators(text, decimal, thousands)
    if decimal == "," and "." in text:
        return ""
    return text.replace(decimal, ".")


def _without_separators(
    text: str,
    decimal: str,
    thousands: str,
) -> str:
    """Remove thousands separators before the decimal mark, if they stand where they should."""
    if thousands == " ":
        text = _SPACES.sub(" ", text)
    integer, mark, fraction = text.partition(decimal)
    if not _GROUPED_DIGITS[thousands].fullmatch(integer):
        return text
    return f"{integer.replace(thousands, '')}{mark}{fraction}"


def text_with_ambiguous_point(texts: Iterable[str]) -> str | None:
    """Return a text of one file's column whose point may be decimal or separate thousands, or None.

    The point is ambiguous if all texts are whole numbers below 1,000 or have three digits after a point, and there are
    both.

    Example:
        >>> text_with_ambiguous_point(["25.548", "873"]), text_with_ambiguous_point(["25.548", "873", "0.5"])
        ('25.548', None)
    """
    with_point = set()
    has_whole_number = False
    for text in texts:
        if _GROUPED_DIGITS["."].fullmatch(text):
            with_point.add(text)
        elif _WHOLE_BELOW_1000.fullmatch(text):
            has_whole_number = True
        else:
            return None
    if not has_whole_number:
        return None
    return max(with_point, default=None)  # any of them would do


_ISO_DATE = re.compile(r"\d{4}-\d\d?-\d\d?([T ].*)?")
_DAY_AND_YEAR = re.compile(r"\d{1,2}([./-])\d{1,2}\1\d{4}((?: \d{1,2}:\d\d(?::\d\d)?)?)")
#: Formats of the time of day, which a date may have.
_TIME_FORMATS = ("", " %H:%M", " %H:%M:%S")


def are_dates(texts: Iterable[str]) -> bool:
    """Return whether all texts look like dates with a four-digit year."""
    return all(_ISO_DATE.fullmatch(text) or _DAY_AND_YEAR.fullmatch(text) for text in texts)


def parse_dates(texts: pd.Series, formats: Sequence[str]) -> pd.Series:
    """Convert texts to dates in UTC, with NaT for what is not a date or is ambiguous.

    A text may have a time of day after a date. It is ambiguous if ``formats`` give different dates.
    """
    iso_texts = texts
    if formats:
        is_iso = texts.isna() | texts.str.match(r"\d{4}-\d")
        iso_texts = texts.where(is_iso)
    dates = _utc_dates(iso_texts, "ISO8601")
    is_ambiguous = pd.Series(False, index=texts.index)
    for date_format, time_format in product(formats, _TIME_FORMATS):
        dates_of_format = _utc_dates(texts, f"{date_format}{time_format}")
        have_both = dates.notna() & dates_of_format.notna()
        is_ambiguous |= have_both & (dates != dates_of_format)
        dates = dates.fillna(dates_of_format)
    return dates.mask(is_ambiguous)


def _utc_dates(texts: pd.Series, date_format: str) -> pd.Series:
    return pd.to_datetime(
        texts,
        format=date_format,
        errors="coerce",
        utc=True,
    )
