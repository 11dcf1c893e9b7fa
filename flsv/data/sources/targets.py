"""Functions that read a table's targets, the classes or numbers to predict, and its groups, which become clients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from flsv.data.groups import check_spelling
from flsv.data.positive_class import positive_last
from flsv.data.sources.columns import LARGEST, Columns, without_gaps
from flsv.data.sources.notation import parsed
from flsv.data.sources.table import Table, words_of
from flsv.utilities.errors import ConfigurationError, listed


def with_values(table: Table, name: str, argument: str, columns: Columns) -> Table:
    """Return a table of the rows that have a value in a column; warn if other rows are left out.

    Args:
        table: the rows.
        name: name of the column.
        argument: the argument in which the user gave ``name``, for messages.
        columns: options of reading, with the marks of missing values.

    Raises:
        ConfigurationError: there is no such column, or no row has a value in it.
    """
    missing = without_gaps(table, name, argument, columns).isna().to_numpy()
    if missing.all():
        raise ConfigurationError(f"{table.path}: no row has a {name!r} ({argument}).")
    if not missing.any():
        return table
    rank_zero_warn(
        f"{table.path}: {missing.sum()} of {len(table)} rows have no {name!r} ({argument}) and are left out."
    )
    return table.take(np.flatnonzero(~missing))


def natural_order(values: Sequence[str]) -> list[int] | list[str]:
    """Convert texts to whole numbers, so that 2 is sorted before 10. If one is no whole number, or is written otherwise
    (``"02"``), return all texts unchanged.

    Example:
        >>> natural_order(["10", "2"]), natural_order(["10", "02"])
        ([10, 2], ['10', '02'])
    """
    try:
        numbers = [int(value) for value in values]
    except ValueError:
        return list(values)
    return numbers if list(map(str, numbers)) == list(values) else list(values)


def group_values(table: Table, name: str) -> np.ndarray:
    """Return the group of each row, ``[N]``: whole numbers if all groups are whole numbers, else texts.

    Raises:
        ConfigurationError: there is no column ``name``, or a row has no group.
    """
    values = words_of(table.column(name, "group")).fillna("")
    empty = np.flatnonzero(values == "").tolist()
    if empty:
        raise ConfigurationError(
            f"{table.path}: {len(empty)} of {len(table)} rows have no {name!r} (group): {table.places(empty)}. Every "
            "row needs a client: fill them in, or leave the rows out."
        )
    names = list(dict.fromkeys(values))
    check_spelling(names, f"{table.path}: {name!r} (group)", refuse=False)
    return values.map(dict(zip(names, natural_order(names)))).to_numpy()


def class_names(table: Table, name: str, argument: str, pos_label: Any = None) -> tuple[str, ...]:
    """Return the names of the classes, the different values of a column, in natural order. The positive one of two
    classes is last, see :func:`~flsv.data.positive_class.positive_last`.

    Args:
        table: rows of one or several tables.
        name: name of the column.
        argument: the argument in which the user gave ``name``, for messages.
        pos_label: the positive one of two classes; None: 1 of 0 and 1, ``True`` of truth values, else the rarer one.

    Raises:
        ConfigurationError: the column has only one value, more values than half its rows, or names that differ only in
            spelling; or it has numbers in one table and words in another, so that ``1`` and ``True`` would be two
            classes.

    Example:
        >>> import pandas as pd
        >>> class_names(Table("wards.csv", pd.DataFrame({"died": ["10", "2", "2", "10", "2"]})), "died", "target")
        ('2', '10')
    """
    about = f"{argument} {name!r}"
    numeric = {part.path: np.isfinite(parsed(words_of(part.column(name, argument)).unique())) for part in table.parts}
    numbers = next((path for path, each in numeric.items() if each.all()), None)
    others = next((path for path, each in numeric.items() if not each.any()), None)
    if numbers is not None and others is not None:
        raise ConfigurationError(
            f"{about} has numbers in {numbers} and words in {others}: write the classes the same way everywhere."
        )
    values = words_of(table.column(name, argument))
    # For mypy: all are numbers or all are words.
    names = tuple(map(str, sorted(natural_order(values.unique().tolist()))))  # type: ignore[type-var]
    if len(names) < 2 or len(names) > max(2, len(values) // 2):
        raise ConfigurationError(
            f"{table.path}: {about} has {len(names)} different values in {len(values)} rows, which cannot be classes. "
            "Name another column; to predict a number, set task: regression in columns."
        )
    check_spelling(names, f"{table.path}: {about}")
    return positive_last(names, [int((values == each).sum()) for each in names], pos_label)


def class_labels(table: Table, name: str, argument: str, classes: Sequence[str]) -> Tensor:
    """Return the number of each row's class, int64 ``[N]``: the index of its value in ``classes``.

    Args:
        table: the rows.
        name: name of the column with the classes.
        argument: the argument in which the user gave ``name``, for messages.
        classes: names of the classes.

    Raises:
        ConfigurationError: a value is not in ``classes``.
    """
    values = words_of(table.column(name, argument))
    labels = pd.Index(classes).get_indexer(values)
    unknown = np.flatnonzero(labels < 0)
    if len(unknown):
        raise ConfigurationError(
            f"{table.where(unknown[0])}: {values.iloc[unknown[0]]!r} in {argument} {name!r} is none of "
            f"the {len(classes)} classes that the training rows have: {listed(classes, 20)}."
        )
    return torch.from_numpy(labels.astype(np.int64))


def numeric_target(table: Table, name: str, columns: Columns) -> np.ndarray:
    """Return the values of a column to predict as numbers, float64 ``[N]``, in the notation that ``columns`` says.

    Raises:
        ConfigurationError: a value is not a finite number, or is too large for single precision.
    """
    column = table.column(name, "target")
    numbers = parsed(column.tolist(), columns.decimal, columns.thousands)
    wrong = np.flatnonzero(~(np.abs(numbers) <= LARGEST))
    if len(wrong):
        where = f"{table.where(wrong[0])}: {str(column.iloc[wrong[0]])!r} in {name!r} (target)"
        raise ConfigurationError(
            f"{where} is not a valid number, as {len(wrong)} of {len(table)}: a class, a missing value (gaps), or in "
            "another notation (decimal, thousands)?"
        )
    return numbers
