"""The former options of columns, which are read into an incomplete data dictionary for one minor release."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from lightning.pytorch.utilities import rank_zero_deprecation

from flsv.data.tables.dictionary import (
    CATEGORIES,
    DAYS,
    DAYS_SINCE_1970,
    REST,
    Dictionary,
    as_dictionary,
)

#: Options of the notation of all files.
_FORMAT_OPTIONS = ("sep", "decimal", "thousands", "encoding", "date_format")


def Columns(**options: Any) -> Dictionary:  # it was a class
    """Convert the options of columns of 2.1 to a data dictionary.

    Deprecated: give ``dictionary`` to :class:`~flsv.FederatedDataModule`.
    """
    rank_zero_deprecation(
        "columns goes with the next minor release: give dictionary=..., a data dictionary."
    )
    for name, value in list(options.items()):
        if value is None:
            del options[name]
    if "encoder" in options:
        return as_dictionary(options["encoder"])

    excluded = options.pop("exclude", [])
    if "features" in options:
        excluded = [REST]
    columns = _pop_columns(options)
    read = _pop_notations(options)

    # All other options are those of a data dictionary, or are refused by it.
    plain = {
        **options,
        "columns": columns,
        "excluded": excluded,
        "read": read,
    }
    return Dictionary.from_plain(plain)


def _pop_columns(options: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Take the options that describe single columns."""
    columns: dict[str, dict[str, Any]] = defaultdict(dict)
    for name in options.pop("features", ()):
        columns[str(name)] = {}
    for name in options.pop("categorical", ()):
        columns[str(name)]["kind"] = CATEGORIES

    start_dates = options.pop("dates", {})
    for name, start_date in start_dates.items():
        kind = f"{DAYS}{start_date}"
        if start_date == "days":
            kind = DAYS_SINCE_1970
        columns[str(name)]["kind"] = kind

    gaps = options.pop("gaps", {})
    if not isinstance(gaps, Mapping):
        gaps = {REST: gaps}
    for name, marks in gaps.items():
        texts = [str(mark) for mark in marks]
        columns[str(name)]["gaps"] = texts
    return columns


def _pop_notations(options: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Take the options on how files are written."""
    file_format = {}
    for name in _FORMAT_OPTIONS:
        if name in options:
            file_format[name] = options.pop(name)
    read = {}
    for name, notation in options.pop("read", {}).items():
        read[name] = {**file_format, **notation}
    if file_format:
        read[REST] = file_format
    return read
