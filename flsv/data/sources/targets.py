"""What rows of tables are told apart by: the classes and numbers to predict, and the groups that are clients."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from flsv.data.groups import check_spelling, spelled_alike
from flsv.data.sources.columns import Columns
from flsv.data.sources.table import Table
from flsv.data.sources.values import LARGEST, all_of, parsed, without_gaps
from flsv.errors import ConfigurationError, listed


def with_values(table: Table, name: str, argument: str, columns: Columns) -> Table:
    """The rows that have a value in a column; of others it is said how many are left out.

    Args:
        table: the rows.
        name: of the column.
        argument: whose value ``name`` is, for messages.
        columns: says what a missing value looks like.

    Raises:
        ConfigurationError: no such column, or no row has a value.
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
    """The values as whole numbers if that loses nothing, else as they are: 2 comes before 10.

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
    """The group of each row ``[N]``, as numbers if all are.

    Raises:
        ConfigurationError: no such column, or a row without a group.
    """
    values = table.words(name, "group").fillna("").tolist()
    empty = [row for row, value in enumerate(values) if not value]
    if empty:
        raise ConfigurationError(
            f"{table.path}: {len(empty)} of {len(table)} rows have no {name!r} (group): {table.places(empty)}. Every "
            "row belongs to a client: fill them in, or leave the rows out."
        )
    names = list(dict.fromkeys(values))
    for alike in spelled_alike(names):
        rank_zero_warn(
            f"{table.path}: {name!r} (group) has {', '.join(map(repr, alike))}, each a client of its own. If they are "
            "one, spell it alike."
        )
    order = dict(zip(names, natural_order(names)))
    return np.array([order[value] for value in values])


def class_names(tables: Sequence[Table], name: str, argument: str) -> tuple[str, ...]:
    """The different values of a column in their natural order.

    Raises:
        ConfigurationError: one only, nearly as many as there are rows, or several that are one to a person; numbers in
            one table and words in another, of which ``1`` and ``True`` would be two classes.

    Example:
        >>> import pandas as pd
        >>> class_names([Table("wards.csv", pd.DataFrame({"ill": ["10", "2", "2", "10", "2"]}))], "ill", "target")
        ('2', '10')
    """
    about, written = f"{argument} {name!r}", {}
    values: list[str] = []
    for table in tables:
        words = table.words(name, argument).tolist()
        numbers = np.isfinite(parsed(set(words)))
        if numbers.all() or not numbers.any():
            written["numbers" if numbers.all() else "words"] = table.path
        values += words
    if len(written) > 1:
        raise ConfigurationError(
            f"{about} has numbers in {written['numbers']} and words in {written['words']}, which would be different "
            "classes. Write the classes alike in all tables."
        )
    names = tuple(map(str, sorted(set(natural_order(list(dict.fromkeys(values)))))))  # type: ignore[type-var]
    if len(names) < 2 or len(names) > max(2, len(values) // 2):
        raise ConfigurationError(
            f"{all_of(tables)}: {about} has {len(names)} different values in {len(values)} rows, which are no classes. "
            "Name another column; for numbers, a table has task: regression."
        )
    check_spelling(names, f"{all_of(tables)}: {about}")
    return names


def class_labels(table: Table, name: str, argument: str, classes: Sequence[str]) -> Tensor:
    """Each value's place among the classes, int64 ``[N]``.

    Raises:
        ConfigurationError: a value that is none of them.
    """
    values = table.words(name, argument).tolist()
    place = {each: number for number, each in enumerate(classes)}
    unknown = next((row for row, value in enumerate(values) if value not in place), None)
    if unknown is not None:
        raise ConfigurationError(
            f"{table.path}, {table.places([unknown])}: {values[unknown]!r} in {argument} {name!r} is none of the "
            f"{len(classes)} classes that the training rows have: {listed(classes, 20)}."
        )
    return torch.tensor([place[value] for value in values], dtype=torch.long)


def numeric_target(table: Table, name: str) -> np.ndarray:
    """A column to predict as numbers, float64 ``[N]``.

    Raises:
        ConfigurationError: a value that is no finite number, or too large for single precision.
    """
    column = table.column(name, "target")
    numbers = parsed(column.tolist())
    wrong = np.flatnonzero(~(np.abs(numbers) <= LARGEST)).tolist()
    if wrong:
        raise ConfigurationError(
            f"{table.path}: {name!r} (target) is no finite number in {len(wrong)} of {len(table)} rows, such "
            f"as {str(column.iloc[wrong[0]])!r} in {table.places(wrong)}. For classes, give "
            "task: classification; what stands for a gap belongs into gaps."
        )
    return numbers
