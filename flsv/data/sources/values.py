"""What a column holds, over all tables of a federation: numbers, truth values, words, or dates; and what rows are told
apart by: the classes and numbers to predict, and the groups that are clients."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pandas as pd
import torch
from lightning.pytorch.utilities import rank_zero_warn
from pandas.api.types import infer_dtype, is_datetime64_any_dtype, is_numeric_dtype
from torch import Tensor

from flsv.data.groups import check_spelling, warn_of_spelling
from flsv.data.sources.columns import Columns
from flsv.data.sources.table import Table, words_of
from flsv.errors import ColumnError, ConfigurationError, listed

NUMBERS, TRUTH, WORDS = "numbers", "truth values", "categories"
DAYS = "days"
#: What pandas calls them.
_KINDS = {
    "integer": NUMBERS,
    "floating": NUMBERS,
    "mixed-integer-float": NUMBERS,
    "decimal": NUMBERS,
    "boolean": TRUTH,
    "string": WORDS,
    "empty": "",
}
_TRUTHS = {"True": 1.0, "TRUE": 1.0, "true": 1.0, "False": 0.0, "FALSE": 0.0, "false": 0.0}
#: What single precision holds, nearly.
LARGEST = 1e38
#: So many different values may still be categories.
FEW = 10
_LEADING_ZERO = re.compile(r"[-+]?0\d.*")
_DATES = ("date", "datetime", "Timestamp")
_DAY = re.compile(r"\d{4}-\d\d?-\d\d?([T ].*)?|\d{1,2}[./-]\d{1,2}[./-]\d{4}( .*)?")


def parsed(values: Iterable[Any]) -> np.ndarray:
    """Values as numbers, float64 ``[N]``; NaN where one is no finite number.

    Example:
        >>> parsed(["3", "-1e3", "high", "1_000", "inf", None])
        array([    3., -1000.,    nan,    nan,    nan,    nan])
    """

    def number(value: Any) -> float:
        try:
            # Python reads 1_000 as a number, which nobody who writes a table means.
            return np.nan if isinstance(value, str) and "_" in value else float(value)
        except (TypeError, ValueError):
            return np.nan

    numbers = np.array([number(value) for value in values], dtype=np.float64)
    return np.where(np.isfinite(numbers), numbers, np.nan)


def without_gaps(table: Table, name: str, argument: str, columns: Columns) -> pd.Series:
    """A column's values, NaN where one is missing; words without white space around them."""
    column, marks = table.column(name, argument), columns.missing(name, table.typed)
    if is_numeric_dtype(column.dtype) and marks == {""}:
        return column
    words = words_of(column)
    gaps = words.isna() | words.isin(marks)
    values = words if _kind_of(column) == WORDS else column.astype(object)
    return values.mask(gaps)


def _kind_of(values: pd.Series) -> str | None:
    """Numbers, truth values or categories; empty without a value, None of anything else."""
    return WORDS if isinstance(values.dtype, pd.CategoricalDtype) else _KINDS.get(infer_dtype(values, skipna=True))


def _kind_of_texts(texts: set[str]) -> str:
    """What a file's column is taken for, by its different values."""
    if not texts or texts <= _TRUTHS.keys():
        return TRUTH if texts else ""
    numbers = np.isfinite(parsed(texts))
    named = numbers.all() and any(map(_LEADING_ZERO.fullmatch, texts))
    return NUMBERS if numbers.any() and not named else WORDS


def read_column(tables: Sequence[Table], name: str, columns: Columns) -> tuple[str, pd.Series]:
    """A column of all tables one after the other: what it holds, and its values, numbers or words, NaN for a gap.

    Raises:
        ColumnError: of several kinds, or of one that is no feature, such as dates; numbers and words in one column; a
            number too large for single precision.

    Example:
        >>> table = Table("a.csv", pd.DataFrame({"came": ["2024-01-30", ""], "left": ["2024-02-02"] * 2}))
        >>> kind, values = read_column([table], "left", Columns(dates={"left": "came"}))
        >>> kind, values.tolist()
        ('days since came', [3.0, nan])
    """
    since = (columns.dates or {}).get(name)
    if since is not None:
        start = np.datetime64(0, "D") if since == DAYS else _days(tables, since, columns)
        days = (_days(tables, name, columns) - start) / np.timedelta64(1, "D")
        return f"days since {'1970' if since == DAYS else since}", days
    parts = [without_gaps(table, name, "features", columns) for table in tables]
    texts = not all(table.typed for table in tables)  # a file among them: all is read as in a file
    named = name in (columns.categorical or ())
    values = pd.concat([words_of(p) if texts or named else p.astype(object) for p in parts], ignore_index=True)
    if named:
        return WORDS, values
    kind = _kind_of_texts(set(values.dropna())) if texts else _kind_of(values)
    if kind is None or (kind == WORDS and texts and all(map(_DAY.fullmatch, values.dropna()))):
        raise _no_kind(tables, name, parts)
    if kind == WORDS:
        return kind, words_of(values)
    numbers = pd.Series(parsed(values.map(lambda value: _TRUTHS.get(value, value)) if kind == TRUTH else values))
    _check_numbers(tables, name, values, numbers, columns)
    return kind or NUMBERS, numbers


def _no_kind(tables: Sequence[Table], name: str, parts: Sequence[pd.Series]) -> ColumnError:
    """The error of a column that is of several kinds, or of one that is no feature; dates in a file are such."""
    kinds = {type(value).__name__: table.path for table, part in zip(tables, parts) for value in part.dropna()}
    remedy: dict[str, Any] = {"exclude": [name]}
    if kinds.keys() <= {*_DATES}:
        remedy = {"dates": {name: DAYS}}
    elif kinds.keys() == {"str"}:
        kinds = {"dates": all_of(tables)}
        days = pd.to_datetime(pd.concat(parts).dropna(), format="ISO8601", errors="coerce", utc=True)
        remedy = {"dates": {name: DAYS}} if days.notna().all() else remedy
    elif kinds.keys() <= {"int", "float", "bool", "str"}:
        remedy = {"categorical": [name]}
    return ColumnError(
        f"{name!r} has {' and '.join(f'{kind} in {path}' for kind, path in kinds.items())}; expected numbers, words or "
        f"truth values, the same in all tables. Count days of dates (dates: {{{name}: days}}, or the column of another "
        f"date to count from; date_format says how they are written), make a category of each value (categorical: "
        f"[{name}]), or leave the column out (exclude: [{name}]).",
        remedy,
    )


def _check_numbers(tables: Sequence[Table], name: str, values: pd.Series, numbers: pd.Series, columns: Columns) -> None:
    wrong = np.flatnonzero(numbers.isna() & values.notna())
    if len(wrong):
        words = {str(word) for word in values[wrong]}
        remedy: dict[str, Any] = {"categorical": [name]}
        if len(words) == 1 and numbers.nunique() > FEW:  # one word among many numbers is a gap, in this column
            remedy = {"exclude": [name]} if isinstance(columns.gaps, list) else {"gaps": {name: [*words]}}
        raise ColumnError(
            f"{place_of(tables, wrong[0])}: {str(values[wrong[0]])!r} in {name!r} is no finite number, but others "
            "there are. If it stands for a gap, add it to this column's gaps; if the column has categories, name it in "
            "categorical.",
            remedy,
        )
    large = np.flatnonzero(numbers.abs() > LARGEST)
    if len(large):
        raise ColumnError(
            f"{place_of(tables, large[0])}: {numbers[large[0]]:g} in {name!r} is too large: features are numbers up to "
            f"{LARGEST:g} (single precision). If it stands for a gap, add it to gaps; else correct it, or leave the "
            "column out.",
            {"exclude": [name]},
        )


def all_of(tables: Sequence[Table]) -> Any:
    """What the tables are called together."""
    return tables[0].path if len(tables) == 1 else f"the {len(tables)} tables"


def place_of(tables: Sequence[Table], row: int) -> str:
    """In which table a row of all together is, and where."""
    first, *others = tables
    return f"{first.path}, {first.places([row])}" if row < len(first) else place_of(others, row - len(first))


def _days(tables: Sequence[Table], name: str, columns: Columns) -> pd.Series:
    found = []
    for table in tables:
        values = without_gaps(table, name, "dates", columns)
        if is_datetime64_any_dtype(table.column(name, "dates")):
            dated = pd.to_datetime(values)
        else:
            texts, form = words_of(values), columns.date_format or "ISO8601"
            dated = pd.to_datetime(texts, format=form, errors="coerce", utc=True)
            wrong = np.flatnonzero(dated.isna() & texts.notna())
            if len(wrong):
                raise ColumnError(
                    f"{table.path}, {table.places([int(wrong[0])])}: {texts.iloc[wrong[0]]!r} in {name!r} is no "
                    f"date as {columns.date_format or 'YYYY-MM-DD'}. Say how dates are written, such as date_format: "
                    "'%d.%m.%Y'; what stands for a gap belongs into gaps.",
                    {"exclude": [name]},
                )
        found.append(dated.dt.tz_localize(None).astype("datetime64[us]"))
    return pd.concat(found, ignore_index=True)


def with_values(table: Table, name: str, argument: str, columns: Columns) -> Table:
    """The rows that have a value in a column; it is said how many others are left out.

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
    values = words_of(table.column(name, "group")).fillna("")
    empty = np.flatnonzero(values == "").tolist()
    if empty:
        raise ConfigurationError(
            f"{table.path}: {len(empty)} of {len(table)} rows have no {name!r} (group): {table.places(empty)}. Every "
            "row belongs to a client: fill them in, or leave the rows out."
        )
    names = list(dict.fromkeys(values))
    warn_of_spelling(names, f"{table.path}: {name!r} (group)")
    return values.map(dict(zip(names, natural_order(names)))).to_numpy()


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
    about = f"{argument} {name!r}"
    words = [words_of(table.column(name, argument)) for table in tables]
    numeric = [np.isfinite(parsed(set(each))) for each in words]
    numbers = next((table.path for table, each in zip(tables, numeric) if each.all()), None)
    others = next((table.path for table, each in zip(tables, numeric) if not each.any()), None)
    if numbers is not None and others is not None:
        raise ConfigurationError(
            f"{about} has numbers in {numbers} and words in {others}, which would be different classes. Write the "
            "classes alike in all tables."
        )
    values = pd.concat(words)
    names = tuple(map(str, sorted(natural_order(values.unique().tolist()))))  # type: ignore[type-var]
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
    values = words_of(table.column(name, argument))
    labels = pd.Index(classes).get_indexer(values)
    unknown = np.flatnonzero(labels < 0)
    if len(unknown):
        raise ConfigurationError(
            f"{table.path}, {table.places(unknown[:1])}: {values.iloc[unknown[0]]!r} in {argument} {name!r} is none of "
            f"the {len(classes)} classes that the training rows have: {listed(classes, 20)}."
        )
    return torch.from_numpy(labels.astype(np.int64))


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
