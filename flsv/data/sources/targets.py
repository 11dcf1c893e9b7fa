"""Functions that read a table's targets, the classes or numbers to predict, and its groups, which become clients."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from flsv.data.groups import check_spelling
from flsv.data.positive_class import in_order, positive_last
from flsv.data.sources.columns import LARGEST, Columns, without_gaps
from flsv.data.sources.notation import parsed
from flsv.data.sources.table import Table, other_words, words_of
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


def group_values(table: Table, name: str) -> np.ndarray:
    """Return the group of each row, ``[N]``: whole numbers, so that 2 is sorted before 10, if all groups are whole
    numbers without zeros before them; else texts.

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
    whole = all(re.fullmatch(r"0|-?[1-9]\d*", each) for each in names)
    return values.map(int if whole else str).to_numpy()


def class_names(
    table: Table, name: str, argument: str, pos_label: Any = None, known: Sequence[str] | None = None
) -> tuple[str, ...]:
    """Return the names of the classes, the different values of a column, in the order of
    :func:`~flsv.data.positive_class.in_order`. The positive one of two classes is last, see
    :func:`~flsv.data.positive_class.positive_last`.

    Args:
        table: rows of one or several tables.
        name: name of the column.
        argument: the argument in which the user gave ``name``, for messages.
        pos_label: the positive one of two classes; None: the larger of two numbers, ``True`` of truth values, else the
            rarer one.
        known: the names of all classes, if the user gave them.

    Raises:
        ConfigurationError: the column has only one value, more values than half its rows, or names that differ only in
            spelling; or some tables have labels of which no other table has any, as ``True`` and ``False`` beside
            ``yes`` and ``no``.

    Example:
        >>> import pandas as pd
        >>> class_names(Table("wards.csv", pd.DataFrame({"died": ["10", "2", "2", "10", "2"]})), "died", "target")
        ('2', '10')
    """
    about = f"{argument} {name!r}"
    values = words_of(table.column(name, argument))
    names = in_order(known or values.unique().tolist())
    if known is None:
        _check_labels(table, about, values, names)
    return positive_last(names, [int((values == each).sum()) for each in names], pos_label)


def _check_labels(table: Table, about: str, values: pd.Series, names: Sequence[str]) -> None:
    if len(names) < 2 or len(names) > max(2, len(values) // 2):
        raise ConfigurationError(
            f"{table.path}: {about} has {len(names)} different values in {len(values)} rows, which cannot be classes. "
            "Name another column; to predict a number, set task: regression in columns."
        )
    check_spelling(names, f"{table.path}: {about}")
    message = other_words(table, about, values)
    if message is not None:
        raise ConfigurationError(
            f"{message} Write the classes the same way everywhere. If all these are classes, name them: columns: "
            f'{{"classes": {json.dumps(names)}}}.'
        )


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
            f"the {len(classes)} classes: {listed(classes, 20)}."
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
