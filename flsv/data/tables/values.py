"""Interprets the values of a table's column as classes, groups or numbers, and refuses ambiguous ones."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor

from flsv.data.groups import check_spelling, spelled_alike
from flsv.data.tables.table import CATEGORIES, NUMBERS, TRUTH, CSVFile
from flsv.errors import ConfigurationError

#: What single precision holds, nearly.
_LARGEST = 1e38


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
    return numbers if all(str(number) == value for number, value in zip(numbers, values)) else list(values)


def group_values(file: CSVFile, name: str) -> np.ndarray:
    """The group of each row ``[N]``, as numbers if all are.

    Raises:
        ConfigurationError: no such column, or a row without a group.
    """
    values = [value.strip() for value in file.column(name, "group")]
    empty = np.flatnonzero(find_gaps(values, [""])).tolist()
    if empty:
        raise ConfigurationError(
            f"{file.path}: {len(empty)} of {len(file)} rows have no {name!r} (group): {file.places(empty)}. Every row "
            "belongs to a client: fill them in, or leave the rows out."
        )
    for alike in spelled_alike(dict.fromkeys(values)):
        rank_zero_warn(
            f"{file.path}: {name!r} (group) has {', '.join(map(repr, alike))}, each a client of its own. If they are "
            "one, spell it alike."
        )
    return np.array(natural_order(values))


def with_values(file: CSVFile, name: str, argument: str, gaps: Collection[str] = ("",)) -> CSVFile:
    """The rows that have a value in a column; of others it is said how many are left out.

    Args:
        file: the rows.
        name: of the column.
        argument: whose value ``name`` is, for messages.
        gaps: what a missing value looks like.

    Raises:
        ConfigurationError: no such column, or no row has a value.
    """
    missing = find_gaps(file.column(name, argument), gaps)
    if missing.all():
        raise ConfigurationError(f"{file.path}: no row has a {name!r} ({argument}).")
    if not missing.any():
        return file
    rank_zero_warn(f"{file.path}: {missing.sum()} of {len(file)} rows have no {name!r} ({argument}) and are left out.")
    rows = np.flatnonzero(~missing)
    columns = {other: [values[row] for row in rows] for other, values in file.columns.items()}
    return replace(file, columns=columns, lines=[file.lines[row] for row in rows])


def class_labels(file: CSVFile, values: Sequence[str], classes: Sequence[str], argument: str) -> Tensor:
    """Each value's place among the classes, int64 ``[N]``.

    Raises:
        ConfigurationError: a value that is none of them.
    """
    place = {name: number for number, name in enumerate(classes)}
    unknown = next((row for row, value in enumerate(values) if value not in place), None)
    if unknown is not None:
        raise ConfigurationError(
            f"{file.path}, {file.places([unknown])}: {values[unknown]!r} in {argument} is none of the "
            f"{len(classes)} classes that the training rows have: {', '.join(list(classes)[:20])}."
        )
    return torch.tensor([place[value] for value in values], dtype=torch.long)


def class_names(file: CSVFile, values: Sequence[str], argument: str) -> tuple[str, ...]:
    """The different values in their natural order.

    Raises:
        ConfigurationError: one only, nearly as many as there are rows, or several that are one to a person.

    Example:
        >>> class_names(CSVFile("wards.csv", {}, []), ["10", "2", "2", "10", "2"], "target")
        ('2', '10')
    """
    names = tuple(map(str, sorted(set(natural_order(values)))))  # type: ignore[type-var]
    if len(names) < 2 or len(names) > max(2, len(values) // 2):
        raise ConfigurationError(
            f"{file.path}: {argument} has {len(names)} different values in {len(values)} rows, which are no classes. "
            "Name another column; for numbers, a table has task: regression."
        )
    check_spelling(names, f"{file.path}: {argument}")
    return names


def numbers_of(
    files: Sequence[CSVFile], name: str, values: Sequence[str], missing: np.ndarray, declared: bool = False
) -> np.ndarray | None:
    """A column as numbers float64 ``[N]`` with NaN for gaps, or None if it has none.

    Args:
        files: whose rows follow each other in ``values``.
        name: of the column.
        values: ``N`` of them.
        missing: which of them are gaps, bool ``[N]``.
        declared: whether they are known to be numbers.

    Raises:
        ConfigurationError: numbers and words in one column; a number too large for single precision.
    """
    numbers = as_numbers(values, missing)
    if numbers is None and not missing.all():
        alone = [as_numbers([value], np.array([gap])) is not None for value, gap in zip(values, missing)]
        if not any(alone) and not declared:
            return None
        row = next(row for row, number in enumerate(alone) if not number and not missing[row])
        raise ConfigurationError(
            f"{_place(files, row)}: {values[row]!r} in {name!r} is no finite number, but others there are. If it "
            "stands for a gap, add it to gaps; if the column has categories, name it in categorical."
        )
    if numbers is not None and (np.abs(numbers) > _LARGEST).any():
        row = int((np.abs(numbers) > _LARGEST).argmax())
        raise ConfigurationError(
            f"{_place(files, row)}: {numbers[row]:g} in {name!r} is too large: features are numbers up to {_LARGEST:g} "
            "(single precision). If it stands for a gap, add it to gaps; else correct it, or leave the column out."
        )
    return numbers


def _place(files: Sequence[CSVFile], row: int) -> str:
    """Where a row of all files together is."""
    file, at = [(file, at) for file in files for at in range(len(file))][row]
    return f"{file.path}, {file.places([at])}"


def numeric_target(file: CSVFile, name: str, values: Sequence[str]) -> np.ndarray:
    """A column to predict as numbers, float64 ``[N]``.

    Raises:
        ConfigurationError: a value that is no finite number, or too large for single precision.
    """
    present = np.zeros(1, dtype=bool)
    numbers = [as_numbers([value], present) for value in values]
    wrong = [row for row, number in enumerate(numbers) if number is None or abs(number[0]) > _LARGEST]
    if wrong:
        raise ConfigurationError(
            f"{file.path}: {name!r} (target) is no finite number in {len(wrong)} of {len(file)} rows, such "
            f"as {values[wrong[0]]!r} in {file.places(wrong)}. For classes, give "
            "task: classification; what stands for a gap belongs into gaps."
        )
    return np.array([number[0] for number in numbers if number is not None])


_KNOWN = (NUMBERS, CATEGORIES, TRUTH)
_DAY = re.compile(r"\d{4}-\d\d?-\d\d?([T ].*)?|\d{1,2}[./-]\d{1,2}[./-]\d{4}( .*)?")
#: How many names a line shows.
_SHOWN = 20


def declared_kind(tables: Sequence[CSVFile], name: str) -> str | None:
    """The kind of a column in all tables; None where only its text can tell.

    Raises:
        ConfigurationError: of several kinds, or of one that is no feature, such as dates.
    """
    found = {table.kinds[name]: table for table in tables if table.kinds is not None and table.kinds[name]}
    strange = next((kind for kind in found if kind not in _KNOWN), None)
    if strange is not None:
        raise ConfigurationError(
            f"{found[strange].path}: {name!r} has values of the type {strange}; expected numbers, words or truth "
            f"values. {_advice(name)}"
        )
    if len(found) > 1:
        told = " and ".join(f"{kind} in {table.path}" for kind, table in found.items())
        raise ConfigurationError(f"{name!r} has {told}: make it the same kind in all, or name it in categorical.")
    kind = next(iter(found), None)
    return kind if kind == CATEGORIES or all(table.kinds is not None for table in tables) else None


def _advice(name: str) -> str:
    return (
        f"Make numbers of them (of a date, the days since another), or leave the column out (exclude: [{name}]); "
        f"categorical: [{name}] makes a category of each."
    )


def check_no_days(table: CSVFile, name: str, values: Iterable[str]) -> None:
    """Raise ConfigurationError where all values are days: a category of each would say nothing of any other."""
    if all(_DAY.fullmatch(value) for value in values):
        raise ConfigurationError(
            f"{table.path}: the values of {name!r} are dates; a category for each day is no feature. {_advice(name)}"
        )


def say_kinds(table: CSVFile, kinds: Mapping[str, str], gaps: Mapping[str, Collection[str]]) -> None:
    """Say what the columns were taken for, a line for each kind.

    Args:
        table: the first of all.
        kinds: of each column that is used.
        gaps: what a column's gaps look like, where it has any.
    """
    told = {kind: [name for name, each in kinds.items() if each == kind] for kind in dict.fromkeys(kinds.values())}
    told["gaps"] = [
        name + "".join(f" {text!r}" for text in sorted(set(texts) - {""})) for name, texts in gaps.items() if texts
    ]
    lines = [f"  {what}: {_some(names)}" for what, names in told.items() if names]
    hint = " (otherwise: categorical, gaps and exclude of the columns)" if table.kinds is None else ""
    rank_zero_info("\n".join([f"{table.path} is read as{hint}", *lines]))


def _some(names: Sequence[str]) -> str:
    more = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {more} more" if more > 0 else "")


def find_gaps(values: Sequence[str], gaps: Collection[str]) -> np.ndarray:
    """Which values are missing, bool ``[N]``; white space around a value does not count.

    Example:
        >>> find_gaps(["3", " ", "NA"], ["", "NA"])
        array([False,  True,  True])
    """
    return np.array([value.strip() in gaps for value in values], dtype=bool)


def as_numbers(values: Sequence[str], missing: np.ndarray) -> np.ndarray | None:
    """float64 ``[N]``, NaN where a value is missing; None if another one is no finite number or all are missing.

    Args:
        values: ``N`` of them.
        missing: bool ``[N]``.

    Example:
        >>> as_numbers(["3", "", "-1e3"], np.array([False, True, False]))
        array([    3.,    nan, -1000.])
        >>> as_numbers(["3", "high"], np.array([False, False])) is None
        True
    """
    numbers = np.full(len(values), np.nan)
    try:
        # Python reads 1_000 as a number, which nobody who writes a table means.
        numbers[~missing] = [float(v) if "_" not in v else np.nan for v, gap in zip(values, missing) if not gap]
    except ValueError:
        return None
    return numbers if np.isfinite(numbers[~missing]).all() and not missing.all() else None


def standardise(x: np.ndarray, fit: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """Each group's columns less their mean, over their standard deviation; gaps become 0, which is the mean.

    With m the mean and s the standard deviation (dividing by the number, not one less) of the group's values in the
    rows that ``fit`` marks, a value x becomes (x - m) / s. A column without spread is only shifted. Where a group has
    no value to fit to, all of its values become 0.

    Args:
        x: float64 ``[N, D]``, NaN where there is a gap.
        fit: which rows the statistics are taken from, bool ``[N]``.
        groups: the group of each row ``[N]``; one for all pools the statistics.

    Returns:
        float64 ``[N, D]``, finite.

    Example:
        >>> x = np.array([[1.0], [3.0], [np.nan], [5.0]])
        >>> standardise(x, fit=np.array([True, True, True, False]), groups=np.zeros(4)).tolist()
        [[-1.0], [1.0], [0.0], [3.0]]
    """
    scaled = np.zeros_like(x)
    for group in np.unique(groups):
        rows = groups == group
        fitted = x[rows & fit]
        known = ~np.isnan(fitted)
        count = known.sum(0)
        mean = np.where(known, fitted, 0).sum(0) / np.maximum(count, 1)
        variance = np.where(known, (fitted - mean) ** 2, 0).sum(0) / np.maximum(count, 1)
        # Equal values differ from their mean by rounding, which is no spread.
        spread = np.where(variance > (1e-12 * np.abs(mean)) ** 2, np.sqrt(variance), 1.0)
        scaled[rows] = np.where(np.isnan(x[rows]) | (count == 0), 0, (x[rows] - mean) / spread)
    return scaled


def one_hot(values: Sequence[str], categories: Sequence[str]) -> np.ndarray:
    """float64 ``[N, K]``: 1 in the column of a value's category; a row of zeros where it is none of them.

    Example:
        >>> one_hot(["b", "a", "c"], ["a", "b"]).tolist()
        [[0.0, 1.0], [1.0, 0.0], [0.0, 0.0]]
    """
    place = {category: column for column, category in enumerate(categories)}
    codes = np.zeros((len(values), len(categories)))
    for row, value in enumerate(values):
        if value in place:
            codes[row, place[value]] = 1
    return codes
