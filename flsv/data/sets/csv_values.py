"""What the values of a CSV file's column stand for: classes, groups, numbers; what cannot be told is refused."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from flsv.data.names import check_spelling, spelled_alike
from flsv.data.sets.csv_file import CSVFile
from flsv.data.sets.encoding import as_numbers, find_gaps
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
