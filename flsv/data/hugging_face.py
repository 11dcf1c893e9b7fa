"""Data sets of Hugging Face: what ``dataset[i]`` returns is a sample, and ``features`` name the classes.

Nothing is imported from the package ``datasets``. It need not be installed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from datetime import date, time
from numbers import Number
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import pandas as pd

#: Number of rows in which words are counted, and in which a column is compared with the samples.
NUM_ROWS_OF_WORDS = 10_000
NUM_COMPARED = 8
#: Largest number of different words of a column that is categories, and no text.
MAX_CATEGORIES = 50


def is_hugging_face(data: Any) -> bool:
    """Return whether ``data`` is a map-style data set of Hugging Face."""
    return isinstance(getattr(data, "features", None), Mapping) and hasattr(data, "column_names")


def are_tables(datasets: Iterable[Any], other_columns: Collection[str | None]) -> bool:
    """Return whether samples have only numbers, dates and categories, apart from ``other_columns``.

    Texts, tokens, images and other arrays are no columns of a table.
    """
    words_by_column: dict[str, set[str]] = {}
    for dataset in datasets:
        if len(dataset) == 0:
            continue
        for name, value in dataset[0].items():
            if name in other_columns:
                continue
            if not _is_field(value):
                return False
            if isinstance(value, str):
                words = dataset[:NUM_ROWS_OF_WORDS][name]
                words_by_column.setdefault(name, set()).update(words)
    return all(len(words) <= MAX_CATEGORIES for words in words_by_column.values())


def _is_field(value: Any) -> bool:
    is_scalar_array = getattr(value, "shape", None) == ()
    return value is None or is_scalar_array or isinstance(value, str | Number | date | time)


def visible_table(dataset: Any, named_columns: Collection[str | None]) -> pd.DataFrame:
    """Return all samples as a DataFrame, with the names of classes in place of their numbers.

    ``named_columns`` are in it even if the data set's format hides them.
    """
    import pandas as pd

    visible_names = list(dataset[0])
    names = [name for name in dataset.column_names if name in {*visible_names, *named_columns}]
    stored_frame = dataset.select_columns(names).to_pandas()
    frame = stored_frame
    if _has_transform(dataset):
        columns = {name: np.asarray(values) for name, values in dataset[:].items()}
        frame = pd.DataFrame(columns)
        for name in names:
            if name not in frame:
                frame[name] = stored_frame[name]

    for name in names:
        class_names = class_names_of_column(dataset, name)
        if class_names:
            frame[name] = frame[name].map(dict(enumerate(class_names)))
    return frame


def class_names_of_column(dataset: Any, name: Any) -> tuple[str, ...]:
    """Return the names of a column's classes, or an empty tuple."""
    if not isinstance(name, str) or not is_hugging_face(dataset):
        return ()
    class_names = getattr(dataset.features.get(name), "names", ())
    if class_names and stored_column(dataset, name) is None:  # a transform makes other numbers
        return ()
    return tuple(class_names)


def stored_column(dataset: Any, name: str) -> list[Any] | None:
    """Return one value per sample from the column ``name`` alone, without decoding other columns.

    Return None if the data set has no such column, or if its samples have other values.
    """
    if not is_hugging_face(dataset) or name not in dataset.column_names:
        return None
    values = list(dataset.with_format(None)[name])
    if _has_transform(dataset):
        num_rows = len(values)
        for row in range(0, num_rows, max(1, num_rows // NUM_COMPARED)):
            if dataset[row].get(name, values[row]) != values[row]:
                return None
    return values


def _has_transform(dataset: Any) -> bool:
    return bool(dataset.format["type"] == "custom")
