"""The former options of columns, which are read into an incomplete data dictionary for one minor release."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
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
_FORMAT_OPTIONS = (
    "sep",
    "decimal",
    "thousands",
    "encoding",
    "date_format",
)


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

    excluded_names = options.pop("exclude", ())
    excluded = dict.fromkeys(excluded_names, "")
    feature_names = options.pop("features", None)
    if feature_names is not None:
        excluded = {REST: ""}
    columns = _pop_columns(options, feature_names or ())
    read = _pop_notations(options)
    # All other options are those of a data dictionary, or are refused by it.
    plain = {**options, "columns": columns, "excluded": excluded, "read": read}
    return Dictionary.from_plain(plain)


def _pop_options(
    options: dict[str, Any],
    names: Iterable[str],
) -> dict[str, Any]:
    """Take the options of these names out, if they are there."""
    values = {}
    for name in names:
        if name in options:
            values[name] = options.pop(name)
    return values


def _pop_columns(
    options: dict[str, Any],
    feature_names: Iterable[Any],
) -> dict[str, dict[str, Any]]:
    """Take the options of single columns out, as the columns of a data dictionary."""
    columns: dict[str, dict[str, Any]] = {}
    for name in feature_names:
        columns[str(name)] = {}
    for name in options.pop("categorical", ()):
        column = columns.setdefault(str(name), {})
        column["kind"] = CATEGORIES

    start_dates = options.pop("dates", {})
    for name, start_date in start_dates.items():
        column = columns.setdefault(str(name), {})
        if start_date == "days":
            column["kind"] = DAYS_SINCE_1970
        else:
            column["kind"] = f"{DAYS}{start_date}"

    gaps = options.pop("gaps", {})
    if not isinstance(gaps, Mapping):
        gaps = {REST: gaps}
    for name, marks in gaps.items():
        column = columns.setdefault(str(name), {})
        column["gaps"] = [str(mark) for mark in marks]
    return columns


def _pop_notations(options: dict[str, Any]) -> dict[str, Any]:
    """Take the options of notations out, by file."""
    file_format = _pop_options(options, _FORMAT_OPTIONS)
    notations = options.pop("read", {})
    read = {}
    for name, notation in notations.items():
        read[name] = {**file_format, **notation}
    if file_format:
        read[REST] = file_format
    return read
