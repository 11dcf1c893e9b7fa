"""What the values of a table's column stand for: classes, groups, numbers; what cannot be told is refused."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from sklearn.preprocessing import StandardScaler
from torch import Tensor

from flsv.data.groups import check_spelling, spelled_alike
from flsv.data.sources.dates import date_remedy
from flsv.data.sources.table import CATEGORIES, NUMBERS, TRUTH, Table, parsed
from flsv.errors import ColumnError, ConfigurationError

#: What single precision holds, nearly.
LARGEST = 1e38
#: Types of dates, as :meth:`Table.kind` calls them.
_DATES = ("date", "datetime", "Timestamp")
_DAY = re.compile(r"\d{4}-\d\d?-\d\d?([T ].*)?|\d{1,2}[./-]\d{1,2}[./-]\d{4}( .*)?")
_IDENTIFIER = re.compile(
    r"(?i)(^|[ _.-])(id|nr|no|number|key|index|pid|uid|uuid|mrn|patient|person|case|record)s?$|[a-z]I[Dd]$"
)
#: How many names a line shows.
_SHOWN = 20
#: So many different values may still be categories.
_FEW = 10


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


def group_values(table: Table, name: str) -> np.ndarray:
    """The group of each row ``[N]``, as numbers if all are.

    Raises:
        ConfigurationError: no such column, or a row without a group.
    """
    values = table.text(name, "group").tolist()
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


def with_values(table: Table, name: str, argument: str, gaps: Collection[str] = ("",)) -> Table:
    """The rows that have a value in a column; of others it is said how many are left out.

    Args:
        table: the rows.
        name: of the column.
        argument: whose value ``name`` is, for messages.
        gaps: what a missing value looks like.

    Raises:
        ConfigurationError: no such column, or no row has a value.
    """
    table.column(name, argument)
    missing = table.gaps(name, gaps)
    if missing.all():
        raise ConfigurationError(f"{table.path}: no row has a {name!r} ({argument}).")
    if not missing.any():
        return table
    rank_zero_warn(
        f"{table.path}: {missing.sum()} of {len(table)} rows have no {name!r} ({argument}) and are left out."
    )
    return table.take(np.flatnonzero(~missing))


def class_labels(table: Table, values: Sequence[str], classes: Sequence[str], argument: str) -> Tensor:
    """Each value's place among the classes, int64 ``[N]``.

    Raises:
        ConfigurationError: a value that is none of them.
    """
    place = {name: number for number, name in enumerate(classes)}
    unknown = next((row for row, value in enumerate(values) if value not in place), None)
    if unknown is not None:
        raise ConfigurationError(
            f"{table.path}, {table.places([unknown])}: {values[unknown]!r} in {argument} is none of the "
            f"{len(classes)} classes that the training rows have: {', '.join(list(classes)[:20])}."
        )
    return torch.tensor([place[value] for value in values], dtype=torch.long)


def class_names(table: Table, values: Sequence[str], argument: str) -> tuple[str, ...]:
    """The different values in their natural order.

    Raises:
        ConfigurationError: one only, nearly as many as there are rows, or several that are one to a person.

    Example:
        >>> import pandas as pd
        >>> class_names(Table("wards.csv", pd.DataFrame(), np.array([])), ["10", "2", "2", "10", "2"], "target")
        ('2', '10')
    """
    names = tuple(map(str, sorted(set(natural_order(list(dict.fromkeys(values)))))))  # type: ignore[type-var]
    if len(names) < 2 or len(names) > max(2, len(values) // 2):
        raise ConfigurationError(
            f"{table.path}: {argument} has {len(names)} different values in {len(values)} rows, which are no classes. "
            "Name another column; for numbers, a table has task: regression."
        )
    check_spelling(names, f"{table.path}: {argument}")
    return names


def check_written_alike(tables: Sequence[Table], labels: Sequence[Sequence[str]], argument: str) -> None:
    """Check that classes are not numbers in one table and words in another: ``1`` and ``True`` would be two classes.

    Raises:
        ConfigurationError: they are.
    """
    numbers: Table | None = None
    words: Table | None = None
    for table, values in zip(tables, labels):
        known = np.isfinite(parsed(sorted(set(values))))
        if len(known) and known.all():
            numbers = table
        if len(known) and not known.any():
            words = table
        if numbers is not None and words is not None:
            raise ConfigurationError(
                f"{argument} has numbers in {numbers.path} and words in {words.path}, which would be different "
                "classes. Write the classes alike in all tables."
            )


def numbers_of(tables: Sequence[Table], name: str, missing: np.ndarray, kind: str | None) -> np.ndarray | None:
    """A column as numbers float64 ``[N]`` with NaN for gaps, or None if it has none.

    Args:
        tables: whose rows follow each other.
        name: of the column.
        missing: which values are gaps, bool ``[N]``.
        kind: what is known of it.

    Raises:
        ConfigurationError: numbers and words in one column; a number too large for single precision.
    """
    numbers = np.where(missing, np.nan, np.concatenate([table.numbers(name, kind == TRUTH) for table in tables]))
    wrong = ~np.isfinite(numbers) & ~missing
    if missing.all() or (kind is None and wrong[~missing].all()):
        return None
    if wrong.any():
        table, row = _row(tables, int(wrong.argmax()))
        raise ColumnError(
            f"{table.path}, {table.places([row])}: {table.text(name)[row]!r} in {name!r} is no finite number, but "
            "others there are. If it stands for a gap, add it to gaps; if the column has categories, name it in "
            "categorical.",
            _gap_or_category(np.concatenate([table.text(name) for table in tables]), numbers, wrong, name),
        )
    if (large := np.abs(numbers) > LARGEST).any():
        place = int(large.argmax())
        table, row = _row(tables, place)
        raise ColumnError(
            f"{table.path}, {table.places([row])}: {numbers[place]:g} in {name!r} is too large: features are numbers "
            f"up to {LARGEST:g} (single precision). If it stands for a gap, add it to gaps; else correct it, or leave "
            "the column out.",
            {"exclude": [name]},
        )
    return numbers


def _gap_or_category(texts: np.ndarray, numbers: np.ndarray, wrong: np.ndarray, name: str) -> dict[str, Any]:
    """What helps a column of numbers and words: with one word among many numbers, the word is a gap."""
    words, known = set(texts[wrong]), np.unique(numbers[np.isfinite(numbers)])
    return {"gaps": [words.pop()]} if len(words) == 1 and len(known) > _FEW else {"categorical": [name]}


def identifier_found(tables: Sequence[Table], name: str, numbers: np.ndarray) -> ColumnError | None:
    """What speaks against numbers that are called as identifiers are, and are whole and no two alike in any table."""
    if not _IDENTIFIER.search(name):
        return None
    for part in np.split(numbers, np.cumsum([len(table) for table in tables])[:-1]):
        known = part[np.isfinite(part)]
        if len(known) <= _FEW or len(np.unique(known)) < len(known) or (known != np.round(known)).any():
            return None
    return ColumnError(
        f"{tables[0].path}: {name!r} has another whole number in every row. An identifier is no feature: leave it out "
        f"(exclude: [{name}]).",
        {"exclude": [name]},
    )


def _row(tables: Sequence[Table], row: int) -> tuple[Table, int]:
    """In which table a row of all together is, and its number there."""
    for table in tables:
        if row < len(table):
            return table, row
        row -= len(table)
    raise IndexError(row)


def numeric_target(table: Table, name: str) -> np.ndarray:
    """A column to predict as numbers, float64 ``[N]``.

    Raises:
        ConfigurationError: a value that is no finite number, or too large for single precision.
    """
    numbers = table.numbers(name)
    wrong = np.flatnonzero(~(np.abs(numbers) <= LARGEST)).tolist()
    if wrong:
        raise ConfigurationError(
            f"{table.path}: {name!r} (target) is no finite number in {len(wrong)} of {len(table)} rows, such "
            f"as {table.text(name)[wrong[0]]!r} in {table.places(wrong)}. For classes, give "
            "task: classification; what stands for a gap belongs into gaps."
        )
    return numbers


def declared_kind(tables: Sequence[Table], name: str) -> str | None:
    """The kind of a column in all tables; None where only its text can tell.

    Raises:
        ConfigurationError: of several kinds, or of one that is no feature, such as dates.
    """
    found = {kind: table for table in tables if (kind := table.kind(name))}
    strange = next((kind for kind in found if kind not in (NUMBERS, CATEGORIES, TRUTH)), None)
    if strange is not None:
        raise ColumnError(
            f"{found[strange].path}: {name!r} has values of the type {strange}; expected numbers, words or truth "
            f"values. {_advice(name)}",
            {"dates": {name: "days"}} if strange in _DATES else {"exclude": [name]},
        )
    if len(found) > 1:
        told = " and ".join(f"{kind} in {table.path}" for kind, table in found.items())
        message = f"{name!r} has {told}: make it the same kind in all, or name it in categorical."
        raise ColumnError(message, {"categorical": [name]})
    kind = next(iter(found), None)
    return kind if kind == CATEGORIES or all(table.typed for table in tables) else None


def _advice(name: str) -> str:
    return (
        f"Say what of a date matters (dates: {{{name}: days}}, parts, or the column of another date to count from), or "
        f"leave the column out (exclude: [{name}]); categorical: [{name}] makes a category of each value."
    )


def check_no_days(table: Table, name: str, values: Iterable[str]) -> None:
    """Raise ColumnError where all values are days: a category of each would say nothing of any other."""
    values = list(values)
    if all(_DAY.fullmatch(value) for value in values):
        raise ColumnError(
            f"{table.path}: the values of {name!r} are dates. {_advice(name)}",
            date_remedy(name, values),
        )


def say_kinds(table: Table, kinds: Mapping[str, str], gaps: Mapping[str, Collection[str]]) -> None:
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
    hint = "" if table.typed else " (otherwise: categorical, gaps and exclude of the columns)"
    rank_zero_info("\n".join([f"{table.path} is read as{hint}", *lines]))


def _some(names: Sequence[str]) -> str:
    more = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {more} more" if more > 0 else "")


def standardise(x: np.ndarray, fit: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """Each group's columns less their mean, over their standard deviation; gaps become 0, which is the mean.

    By scikit-learn's ``StandardScaler``, fitted to the group's values in the rows that ``fit`` marks. A column without
    spread is only shifted. Where a group has no value to fit to, all of its values become 0.

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
        with np.errstate(invalid="ignore"):  # of a column without a value
            scaled[rows] = StandardScaler().fit(x[rows & fit]).transform(x[rows])
    return np.nan_to_num(scaled, nan=0.0, posinf=0.0, neginf=0.0)
