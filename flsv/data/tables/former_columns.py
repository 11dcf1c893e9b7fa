"""The former options of columns, which are read into an incomplete data dictionary for one minor release."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning.pytorch.utilities import rank_zero_deprecation

from flsv.data.tables.dictionary import CATEGORIES, DAYS, DAYS_SINCE_1970, REST, Dictionary
from flsv.utilities.errors import ConfigurationError

#: Options that a data dictionary has, too.
_SAME_OPTIONS = ("task", "standardize_target", "classes")
#: Options of the notation of all files.
_FORMAT_OPTIONS = ("sep", "decimal", "thousands", "encoding", "date_format")
_WITHOUT_SUCCESSOR = ("max_categories", "min_rows")


def Columns(**options: Any) -> Dictionary:  # it was a class
    """Convert the options of columns of 2.1 to a data dictionary.

    Deprecated: give ``dictionary`` to :class:`~flsv.FederatedDataModule`.
    """
    rank_zero_deprecation(
        "columns goes with the next minor release: give dictionary=..., a data dictionary."
    )
    options = {name: value for name, value in options.items() if value is not None}
    if "encoder" in options:
        return _from_encoder(options["encoder"])
    columns: dict[str, dict[str, Any]] = {}
    excluded = dict.fromkeys(options.pop("exclude", ()), "")
    features = options.pop("features", None)
    if features is not None:
        columns = {str(name): {} for name in features}
        excluded = {REST: ""}
    for name in options.pop("categorical", ()):
        columns.setdefault(str(name), {})["kind"] = CATEGORIES
    for name, start in options.pop("dates", {}).items():
        kind = DAYS_SINCE_1970 if start == "days" else f"{DAYS}{start}"
        columns.setdefault(str(name), {})["kind"] = kind
    gaps = options.pop("gaps", {})
    if not isinstance(gaps, Mapping):
        gaps = {REST: gaps}
    for name, marks in gaps.items():
        columns.setdefault(str(name), {})["gaps"] = [str(mark) for mark in marks]

    file_format = {name: options.pop(name) for name in _FORMAT_OPTIONS if name in options}
    read = {name: {**file_format, **notation} for name, notation in options.pop("read", {}).items()}
    if file_format:
        read[REST] = file_format
    plain: dict[str, Any] = {"columns": columns, "excluded": excluded, "read": read}
    plain |= {name: options.pop(name) for name in _SAME_OPTIONS if name in options}
    if options:
        hint = ""
        if options.keys() & set(_WITHOUT_SUCCESSOR):
            hint = " Give columns of many words kind: categories."
        raise ConfigurationError(f"columns: {sorted(options)} is no longer an option.{hint}")
    return Dictionary.from_plain(plain)


def _from_encoder(encoder: Any) -> Dictionary:
    if not isinstance(encoder, Mapping):
        return Dictionary.from_file(encoder)
    return Dictionary.from_plain(encoder)
