"""Objects with named columns: DataFrames of pandas and polars, Arrow tables, Hugging Face data sets.

None of their libraries is needed: what has ``column_names`` or ``columns``, a length, and gives a column by its name,
is one of them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch.utils.data import Dataset

from flsv.data.sets.column_kinds import CATEGORIES, kind_of
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
    return _values(frame[key])


def frame_table(frame: Any, leave_out: tuple[str, ...] = ()) -> CSVFile:
    """An object's columns as those of a CSV file, and of what kind their values are, which their text does not tell.

    A gap (``None``, NaN) is an empty text. Numbers of classes that have names are these names, -1 a gap.

    Args:
        frame: has columns of numbers, words and truth values.
        leave_out: names of columns that are there and not read, such as pictures.

    Example:
        >>> class Frame:
        ...     columns = ("ward", "age")
        ...     def __len__(self):
        ...         return 2
        ...     def __getitem__(self, name):
        ...         return {"ward": ["07", None], "age": [30.0, float("nan")]}[name]
        >>> table = frame_table(Frame())
        >>> table.columns, table.kinds
        ({'ward': ['07', ''], 'age': ['30', '']}, {'ward': 'categories', 'age': 'numbers'})
    """
    columns: dict[str, list[str]] = {}
    kinds: dict[str, str] = {}
    for name, key in (column_keys(frame) or {}).items():
        if name in leave_out:
            columns[name], kinds[name] = [""] * len(frame), ""
            continue
        found = frame[key]
        values = [_plain(value) for value in _values(found)]
        if (classes := _class_names(frame, key)) is not None:
            values = [None if value is None or value == -1 else classes[int(value)] for value in values]
        kinds[name] = CATEGORIES if _is_categorical(found) else kind_of(value for value in values if value is not None)
        # Whole numbers come as 3.0 out of a column that has gaps, or of integers that were read as floats.
        whole = all(value.is_integer() for value in values if isinstance(value, float) and math.isfinite(value))
        columns[name] = [_text(value, whole) for value in values]
    return CSVFile(type(frame).__name__, columns, list(range(len(frame))), unit="row", kinds=kinds)


def _values(column: Any) -> list[Any]:
    for name in ("to_list", "tolist", "to_pylist"):
        if hasattr(column, name):
            return list(getattr(column, name)())
    return list(column)


def _plain(value: Any) -> Any:
    """A value as Python has it; None for a gap."""
    if hasattr(value, "item") and getattr(value, "ndim", 1) == 0:
        value = value.item()
    missing = type(value).__name__ in ("NAType", "NaTType") or (isinstance(value, float) and math.isnan(value))
    return None if missing else value


def _text(value: Any, whole: bool) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return str(int(value)) if whole and math.isfinite(value) else repr(value)
    return str(value)


def _class_names(frame: Any, key: Any) -> Sequence[str] | None:
    """Hugging Face's names for the numbers of a column."""
    return getattr(frame.features.get(key), "names", None) if is_hugging_face(frame) else None


def _is_categorical(column: Any) -> bool:
    """Whether its library (pandas, polars, Arrow) says that a column has categories, whatever these are."""
    kind = str(getattr(column, "dtype", getattr(column, "type", ""))).lower()
    return kind.startswith(("category", "categorical", "enum", "dictionary"))
