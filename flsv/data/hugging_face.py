"""Data sets of Hugging Face: what ``dataset[i]`` returns is a sample, and ``features`` name the classes.

Nothing is imported from the package ``datasets``. It need not be installed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from datetime import date, time
from numbers import Number
from types import NoneType
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import pandas as pd

#: Number of rows in which words are counted, and in which a column is compared with the samples.
NUM_ROWS_OF_WORDS = 10_000
NUM_COMPARED = 8
#: Largest number of different words of a column that is categories, and no text.
MAX_CATEGORIES = 50
#: Types of a table's fields.
_FIELD_TYPES = (
    str,
    Number,
    date,
    time,
    NoneType,
)


def is_hugging_face(data: Any) -> bool:
    """Return whether ``data`` is a map-style data set of Hugging Face."""
    features = getattr(data, "features", None)
    return isinstance(features, Mapping) and hasattr(data, "column_names")


def are_tables(datasets: Iterable[Any], other_columns: Collection[str | None]) -> bool:
    """Return whether samples have only numbers, dates and categories, apart from ``other_columns``.

    Texts, tokens, images and other arrays are no columns of a table.
    """
    words_by_column = defaultdict[str, set[str]](set)
    for dataset in datasets:
        if len(dataset) == 0:
            continue
        for name, value in dataset[0].items():
            if name in other_columns:
                continue
            if not _is_field(value):
                return False
            if isinstance(value, str):
                rows = dataset[:NUM_ROWS_OF_WORDS]
                words_by_column[name].update(rows[name])

    numbers_of_words = map(len, words_by_column.values())
    return max(numbers_of_words, default=0) <= MAX_CATEGORIES


def _is_field(value: Any) -> bool:
    shape = getattr(value, "shape", None)
    is_scalar_array = shape == ()
    is_scalar = isinstance(value, _FIELD_TYPES)
    return is_scalar or is_scalar_array


def visible_table(
    dataset: Any, named_columns: Collection[str | None], label: str | None = None
) -> pd.DataFrame:
    """Return all samples as a DataFrame, with the names of classes in place of their numbers.

    ``named_columns`` are in it even if the data set's format hides them. The column ``label`` keeps the order of its
    classes.
    """
    import pandas as pd

    wanted_names = {*dataset[0], *named_columns}
    names = [name for name in dataset.column_names if name in wanted_names]
    stored_columns = dataset.select_columns(names)
    frame = stored_columns.to_pandas()
    if _has_transform(dataset):
        samples = dataset[:]
        columns = {name: np.asarray(values) for name, values in samples.items()}
        hidden_names = [name for name in names if name not in columns]
        hidden_frame = frame[hidden_names]
        frame = pd.DataFrame(columns).join(hidden_frame)

    for name in names:
        class_names = class_names_of_column(dataset, name)
        if class_names:
            name_by_number = dict(enumerate(class_names))
            frame[name] = frame[name].map(name_by_number)
        if class_names and name == label:
            frame[name] = pd.Categorical(frame[name], categories=class_names, ordered=True)
    return frame


def class_names_of_column(dataset: Any, name: Any) -> tuple[str, ...]:
    """Return the names of a column's classes, or an empty tuple."""
    if not isinstance(name, str) or not is_hugging_face(dataset):
        return ()
    feature = dataset.features.get(name)
    class_names = getattr(feature, "names", ())
    if class_names and stored_column(dataset, name) is None:  # a transform makes other numbers
        return ()
    return tuple(class_names)


def stored_column(dataset: Any, name: str) -> list[Any] | None:
    """Return one value per sample from the column ``name`` alone, without decoding other columns.

    Return None if the data set has no such column, or if its samples have other values.
    """
    if not is_hugging_face(dataset) or name not in dataset.column_names:
        return None
    plain_dataset = dataset.with_format(None)
    values = list(plain_dataset[name])
    if not _has_transform(dataset):
        return values

    step = len(values) // NUM_COMPARED
    for row in range(0, len(values), max(step, 1)):
        sample = dataset[row]
        if name in sample and sample[name] != values[row]:
            return None
    return values


def _has_transform(dataset: Any) -> bool:
    return bool(dataset.format["type"] == "custom")
