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
    options = {name: value for name, value in options.items() if value is not None}
    if "encoder" in options:
        return as_dictionary(options["encoder"])

    columns: dict[str, dict[str, Any]] = defaultdict(dict)
    excluded = options.pop("exclude", [])
    if "features" in options:
        excluded = [REST]
        columns |= {str(name): {} for name in options.pop("features")}
    for name in options.pop("categorical", ()):
        columns[str(name)]["kind"] = CATEGORIES
    for name, start in options.pop("dates", {}).items():
        columns[str(name)]["kind"] = DAYS_SINCE_1970 if start == "days" else f"{DAYS}{start}"

    gaps = options.pop("gaps", {})
    if not isinstance(gaps, Mapping):
        gaps = {REST: gaps}
    for name, marks in gaps.items():
        columns[str(name)]["gaps"] = list(map(str, marks))

    file_format = {name: options.pop(name) for name in _FORMAT_OPTIONS if name in options}
    read = {}
    for name, notation in options.pop("read", {}).items():
        read[name] = {**file_format, **notation}
    if file_format:
        read[REST] = file_format
    # All other options are those of a data dictionary, or are refused by it.
    plain = {**options, "columns": columns, "excluded": excluded, "read": read}
    return Dictionary.from_plain(plain)
