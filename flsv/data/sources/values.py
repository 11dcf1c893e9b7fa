"""What a column holds, over all tables of a federation: numbers, truth values or words; dates, as numbers and words."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import pandas as pd
from pandas.api.types import infer_dtype, is_datetime64_any_dtype, is_numeric_dtype

from flsv.data.sources.columns import Columns
from flsv.data.sources.table import Table, words_of
from flsv.errors import ColumnError

NUMBERS, TRUTH, WORDS = "numbers", "truth values", "categories"
DAYS, PARTS = "days", "parts"
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


def _kind_of(values: pd.Series) -> str:
    """Numbers, truth values or categories, else the names of its values' types; empty where there is no value."""
    if isinstance(values.dtype, pd.CategoricalDtype):
        return WORDS
    found = _KINDS.get(infer_dtype(values, skipna=True))
    return ", ".join(sorted({type(value).__name__ for value in values.dropna().tolist()})) if found is None else found


def _kind_of_texts(texts: Iterable[str]) -> str:
    """What a file's column is taken for, by its different values."""
    texts = list(texts)
    if not texts:
        return ""
    if all(text in _TRUTHS for text in texts):
        return TRUTH
    numbers = np.isfinite(parsed(texts))
    named = numbers.all() and any(_LEADING_ZERO.fullmatch(text) for text in texts)
    return NUMBERS if numbers.any() and not named else WORDS


def read_column(tables: Sequence[Table], name: str, columns: Columns) -> tuple[str, pd.Series]:
    """A column of all tables one after the other: what it holds, and its values, numbers or words, NaN for a gap.

    Raises:
        ColumnError: of several kinds, or of one that is no feature, such as dates; numbers and words in one column; a
            number too large for single precision.
    """
    parts = [without_gaps(table, name, "features", columns) for table in tables]
    if name in (columns.categorical or ()):
        return WORDS, pd.concat(map(words_of, parts), ignore_index=True)
    texts = {text for table, part in zip(tables, parts) if not table.typed for text in part.dropna()}
    kind = _one_kind(name, tables, parts, _kind_of_texts(texts))
    values = pd.concat([part.astype(object) for part in parts], ignore_index=True)
    if kind == WORDS:
        values = words_of(values)
        _check_no_days(tables, name, values, all(table.typed for table in tables))
        return kind, values
    if kind == TRUTH:
        values = values.map(lambda value: _TRUTHS.get(value, value))
    numbers = pd.Series(parsed(values))
    _check_numbers(tables, name, values, numbers, columns)
    return kind or NUMBERS, numbers


def _one_kind(name: str, tables: Sequence[Table], parts: Sequence[pd.Series], of_files: str) -> str:
    """Of a column of all tables, where ``of_files`` is that of those whose columns are text; empty without a value."""
    kinds: dict[str, Table] = {}
    for table, part in zip(tables, parts):
        if not part.isna().all():
            kinds.setdefault(_kind_of(part) if table.typed else of_files, table)
    strange = next((kind for kind in kinds if kind not in (NUMBERS, WORDS, TRUTH)), None)
    if strange is not None:
        raise ColumnError(
            f"{kinds[strange].path}: {name!r} has values of the type {strange}; expected numbers, words or truth "
            f"values. {_advice(name)} Images and arrays are no columns of a table: without labels, the rows of a "
            "Hugging Face data set are given to the model as dictionaries.",
            {"dates": {name: DAYS}} if strange in _DATES else {"exclude": [name]},
        )
    if len(kinds) > 1:
        held = " and ".join(f"{kind} in {table.path}" for kind, table in kinds.items())
        message = f"{name!r} has {held}: make it the same kind in all, or name it in categorical."
        raise ColumnError(message, {"categorical": [name]})
    return next(iter(kinds), "")


def _check_no_days(tables: Sequence[Table], name: str, words: pd.Series, meant: bool) -> None:
    """Raise ColumnError where all values of a file's column are days: a category of each says nothing of any other."""
    held = words.dropna().tolist()
    if not meant and all(_DAY.fullmatch(word) for word in held):
        message = f"{all_of(tables)}: the values of {name!r} are dates. {_advice(name)}"
        raise ColumnError(message, date_remedy(name, held))


def _advice(name: str) -> str:
    return (
        f"Say what of a date matters (dates: {{{name}: days}}, parts, or the column of another date to count from), or "
        f"leave the column out (exclude: [{name}]); categorical: [{name}] makes a category of each value."
    )


def _check_numbers(tables: Sequence[Table], name: str, values: pd.Series, numbers: pd.Series, columns: Columns) -> None:
    wrong = np.flatnonzero(numbers.isna() & values.notna())
    if len(wrong):
        raise ColumnError(
            f"{place_of(tables, wrong[0])}: {str(values[wrong[0]])!r} in {name!r} is no finite number, but others "
            "there are. If it stands for a gap, add it to this column's gaps; if the column has categories, name it in "
            "categorical.",
            _gap_or_category(name, set(values[wrong]), numbers, columns),
        )
    large = np.flatnonzero(numbers.abs() > LARGEST)
    if len(large):
        raise ColumnError(
            f"{place_of(tables, large[0])}: {numbers[large[0]]:g} in {name!r} is too large: features are numbers up to "
            f"{LARGEST:g} (single precision). If it stands for a gap, add it to gaps; else correct it, or leave the "
            "column out.",
            {"exclude": [name]},
        )


def _gap_or_category(name: str, words: set[Any], numbers: pd.Series, columns: Columns) -> dict[str, Any]:
    """What helps a column of numbers and words, and changes no other: one word among many numbers is a gap."""
    if len(words) > 1 or numbers.nunique() <= FEW:
        return {"categorical": [name]}
    return {"exclude": [name]} if isinstance(columns.gaps, list) else {"gaps": {name: [str(words.pop())]}}


def all_of(tables: Sequence[Table]) -> Any:
    """What the tables are called together."""
    return tables[0].path if len(tables) == 1 else f"the {len(tables)} tables"


def place_of(tables: Sequence[Table], row: int) -> str:
    """In which table a row of all together is, and where."""
    for table in tables:
        if row < len(table):
            return f"{table.path}, {table.places([int(row)])}"
        row -= len(table)
    raise IndexError(row)


def read_dates(tables: Sequence[Table], name: str, columns: Columns) -> list[tuple[str, str, pd.Series]]:
    """What a column of dates of all tables becomes: names of columns, what each is, and its values.

    Raises:
        ColumnError: a value that is no such date.

    Example:
        >>> table = Table("a.csv", pd.DataFrame({"came": ["2024-01-30", ""], "left": ["2024-02-02"] * 2}))
        >>> read_dates([table], "left", Columns(dates={"left": "came"}))[0][2].tolist()
        [3.0, nan]
        >>> [(name, values[0]) for name, _, values in read_dates([table], "left", Columns(dates={"left": "parts"}))]
        [('left year', 2024.0), ('left month', 'February'), ('left weekday', 'Friday')]
    """
    how = (columns.dates or {})[name]
    days = _days(tables, name, columns)
    if how == PARTS:
        parts: tuple[tuple[str, Callable[[], pd.Series]], ...] = (
            ("year", lambda: days.dt.year.astype(float)),
            ("month", days.dt.month_name),
            ("weekday", days.dt.day_name),
        )
        return [(f"{name} {part}", part, values().astype(object)) for part, values in parts]
    since = np.datetime64(0, "D") if how == DAYS else _days(tables, how, columns)
    return [(name, f"days since {'1970' if how == DAYS else how}", (days - since) / np.timedelta64(1, "D"))]


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


def date_remedy(name: str, values: Sequence[str]) -> dict[str, Any]:
    """Options with which a column of days can be used: it is left out where the day cannot be told from the month.

    Example:
        >>> date_remedy("seen", ["31.1.2024"]), date_remedy("seen", ["1/2/2024"]), date_remedy("seen", ["2024-01-31"])
        ({'dates': {'seen': 'days'}, 'date_format': '%d.%m.%Y'}, {'exclude': ['seen']}, {'dates': {'seen': 'days'}})
    """
    texts = pd.Series(list(values), dtype=object)
    fitting = [
        form
        for form in (None, "%d.%m.%Y", "%d/%m/%Y", "%m/%d/%Y", "%d-%m-%Y", "%m-%d-%Y")
        if pd.to_datetime(texts, format=form or "ISO8601", errors="coerce", utc=True).notna().all()
    ]
    if len(fitting) != 1:
        return {"exclude": [name]}
    return {"dates": {name: DAYS}} | ({} if fitting[0] is None else {"date_format": fitting[0]})
