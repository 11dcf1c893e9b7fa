"""Objects with named columns: DataFrames of pandas and polars, Arrow tables, Hugging Face data sets.

None of their libraries is needed: what has ``column_names`` or ``columns``, a length, and gives a column by its name,
is one of them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch.utils.data import Dataset

from flsv.data.sets.csv_file import CSVFile
from flsv.errors import ConfigurationError


def column_keys(frame: Any) -> dict[str, Any] | None:
    """What gives the columns, by their names; None where the object has no columns.

    Raises:
        ConfigurationError: two columns of one name.

    Example:
        >>> column_keys([1, 2]) is None
        True
    """
    if isinstance(frame, Dataset | Mapping | type) or not hasattr(frame, "__getitem__"):
        return None
    names = getattr(frame, "column_names", None)
    names = getattr(frame, "columns", None) if names is None else names
    if names is None or callable(names) or not hasattr(frame, "__len__"):
        return None
    keys = {str(name).strip(): name for name in names}
    if len(keys) < len(names):
        twice = sorted({str(name) for name in names if sum(str(other) == str(name) for other in names) > 1})
        raise ConfigurationError(
            f"{type(frame).__name__}: several columns are called {twice[0] if twice else names!r}."
        )
    return keys


def is_columnar(frame: Any) -> bool:
    """Whether it has named columns."""
    return column_keys(frame) is not None


def is_hugging_face(frame: Any) -> bool:
    """Whether it is a data set of the library ``datasets``: rows by number, columns by name, ``features``."""
    return is_columnar(frame) and isinstance(getattr(frame, "features", None), Mapping)


def column_values(frame: Any, key: Any) -> list[Any]:
    """A column's values, whatever the library calls the way to them."""
    found = frame[key]
    for name in ("to_list", "tolist", "to_pylist"):
        if hasattr(found, name):
            return list(getattr(found, name)())
    return list(found)


def frame_table(frame: Any, leave_out: tuple[str, ...] = ()) -> CSVFile:
    """An object's columns as those of a CSV file: text, where an empty one is a gap (``None``, NaN).

    Args:
        frame: has columns of numbers, words and truth values.
        leave_out: names of columns that are there and not read, such as pictures.

    Example:
        >>> class Frame:
        ...     columns = ("ward", "age")
        ...     def __len__(self):
        ...         return 2
        ...     def __getitem__(self, name):
        ...         return {"ward": ["A", None], "age": [30.0, float("nan")]}[name]
        >>> frame_table(Frame()).columns
        {'ward': ['A', ''], 'age': ['30', '']}
    """
    keys = column_keys(frame) or {}
    columns = {
        name: [""] * len(frame) if name in leave_out else _texts(column_values(frame, key))
        for name, key in keys.items()
    }
    return CSVFile(type(frame).__name__, columns, list(range(len(frame))), unit="row")


def _texts(values: list[Any]) -> list[str]:
    # Whole numbers come as 3.0 out of a column that has gaps, or of integers that were read as floats.
    floats = [value for value in values if isinstance(value, float)]
    whole = all(value.is_integer() for value in floats if math.isfinite(value))
    return [_text(value, whole) for value in values]


def _text(value: Any, whole: bool) -> str:
    if value is None or type(value).__name__ in ("NAType", "NaTType"):
        return ""
    if hasattr(value, "item") and getattr(value, "ndim", 1) == 0:
        value = value.item()
    if isinstance(value, float):
        if math.isnan(value):
            return ""
        return str(int(value)) if whole and math.isfinite(value) else repr(value)
    return str(value)
