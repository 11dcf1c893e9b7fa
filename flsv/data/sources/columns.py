"""Options of a table's columns, and functions that read a column as numbers, truth values, words, or dates."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeAlias

import numpy as np
import pandas as pd
from annotated_types import Ge
from pandas.api.types import infer_dtype, is_datetime64_any_dtype, is_numeric_dtype

from flsv.data.sources.table import Table, words_of
from flsv.utilities.arguments import check_kind
from flsv.utilities.declared import Rules, checked
from flsv.utilities.errors import ColumnError, ConfigurationError

GAPS = ("", "NA", "N/A", "NaN", "nan", "null", ".", "?")


@checked
@dataclass
class Columns:
    """Options that turn the columns of a table into inputs and targets.

    The kind of a column is decided once, over the tables of all clients and of the server together. A file's column
    holds numbers if all its values but gaps are numbers and none begins with a zero that a number would lose
    (``01234``); truth values, which become one number, 0 or 1, if all are ``True`` or ``False``; else words. Columns of
    a Parquet file or a DataFrame keep their type: words stay words, whatever they look like, pandas' categories stay
    categories, and gaps are ``None``, NaN and blank words. The kind of every column is logged.

    Columns of dates are refused unless ``dates`` turns them into days since 1970 or since another column's date (the
    length of a stay from ``{"left": "came"}``). One message reports all unusable columns, with options to paste.

    Numbers are standardized, and a gap (a missing value) becomes 0, the mean. Other columns are one-hot encoded; a gap,
    or a category that no training row has, becomes a row of zeros. For a column with a gap in a training row there is
    another feature, which is 1 for rows with a gap and 0 for others. Rows without a target are left out, with a
    warning.

    Means, deviations and categories are fitted on all clients' training rows together. So every client's rows have a
    small influence on the other clients' features; on several machines the clients would have to send the count, the
    sum and the sum of squares of each column. The clients have to agree beforehand on the columns, the categories'
    names (the union over the clients' training rows), the classes' names (the union over all rows) and which columns
    have gaps.

    A number to predict stays as in the table. With ``standardize_target``, the mean of the training rows is subtracted
    and the result is divided by their standard deviation; squared errors are then shares of the target's variance.
    Without it a network starts far from the mean, and the first gain of every client's training is to learn the mean.

    Args:
        task: ``"classification"`` if the target's values are classes, or ``"regression"``.
        features: columns to predict from; None: all columns except the target and the group, even identifiers and
            columns known only after the target.
        exclude: columns to leave out; some tables may lack them.
        categorical: columns whose numbers are names of categories.
        gaps: marks of a missing value besides blanks; None: :data:`GAPS` in a text file, no marks in a DataFrame. A
            dictionary ``{column: marks}`` adds marks for some columns. Numbers match in every notation: ``-99`` also
            matches ``-99.0``.
        standardize_target: whether to subtract the mean of a regression's target and divide by its standard deviation.
        max_categories: largest number of categories of a column; a column with more is refused.
        delimiter: character between the values in a file.
        decimal: decimal mark of numbers in a file. With ``","``, ``"12,5"`` is a number, and ``"12.5"`` and
            ``"1.234,5"`` are not.
        dates: ``{column: start}`` for columns of dates, which become numbers of days: since 1970 if ``start`` is
            ``"days"``, else since the date in the column ``start``.
        date_format: format of dates, as for ``strftime``; None: ISO 8601, such as ``2024-03-31``.

    Raises:
        ConfigurationError: arguments are out of range or contradict each other.
    """

    rules: ClassVar[Rules] = (
        (
            lambda a: not a.standardize_target or a.task == "regression",
            "standardize_target is for task: regression; classes have no mean.",
        ),
    )

    task: Literal["classification", "regression"] = "classification"
    features: list[str] | None = None
    exclude: list[str] | None = None
    categorical: list[str] | None = None
    gaps: list[str] | dict[str, list[str]] | None = None
    standardize_target: bool = False
    max_categories: Annotated[int, Ge(2)] = 50
    delimiter: str = ","
    decimal: Literal[".", ","] = "."
    dates: dict[str, str] | None = None
    date_format: str | None = None

    def missing(self, name: str, typed: bool = False) -> set[str]:
        """Return the marks of a missing value in the column ``name``; with ``typed``, in a DataFrame's column."""
        usual = () if typed else GAPS
        if isinstance(self.gaps, dict):
            return {"", *usual, *self.gaps.get(name, ())}
        return {"", *(usual if self.gaps is None else self.gaps)}

    def __post_init__(self) -> None:
        # Columns of a DataFrame may be called by numbers.
        self.features, self.exclude = _texts(self.features), _texts(self.exclude)
        self.categorical = _texts(self.categorical)
        if isinstance(self.gaps, Mapping):
            self.gaps = {str(name).strip(): _texts(marks) or [] for name, marks in self.gaps.items()}
        else:
            self.gaps = _texts(self.gaps)
        self.dates = {str(name).strip(): how.strip() for name, how in (self.dates or {}).items()}

    def check_roles(self, target: str, group: str | None) -> None:
        """Raise ConfigurationError if the column ``target`` or ``group`` has another role as well."""
        used = [*(self.features or ()), *(self.categorical or ()), *(self.dates or ())]
        twice = next((name for name in (target, group) if name in used or target == group), None)
        if twice is not None:
            raise ConfigurationError(f"Columns: {twice!r} is the target or the group, and cannot be anything else.")

    def remedied(self, problems: Iterable[ColumnError]) -> dict[str, Any]:
        """Return the options that differ from their defaults, together with the options that solve the problems."""
        options = {each.name: getattr(self, each.name) for each in fields(self)}
        options = {name: value for name, value in options.items() if value not in (None, {}, getattr(Columns, name))}
        for problem in problems:
            for name, value in problem.remedy.items():
                held = options.get(name, type(value)())
                if isinstance(value, list):
                    value = list(dict.fromkeys([*held, *value]))
                options[name] = {**held, **value} if isinstance(value, dict) else value
        # A column that is excluded, because another remedy failed, needs no other option.
        left = [name for name in options.get("categorical", ()) if name not in options.get("exclude", ())]
        return {**options, "categorical": left} if left else {k: v for k, v in options.items() if k != "categorical"}


def _texts(given: Any) -> list[str] | None:
    given = [given] if isinstance(given, str) else given
    return None if given is None else [str(each).strip() for each in given]


if TYPE_CHECKING:
    GivenColumns: TypeAlias = Columns | Mapping[str, Any] | None
else:
    GivenColumns = Columns | None  # which the command line takes apart into options


def as_columns(given: GivenColumns) -> Columns:
    """Return the options as ``Columns``; a dictionary is converted, and None gives the defaults."""
    found = Columns(**given) if isinstance(given, Mapping) else given or Columns()
    check_kind("columns", "columns", found, Columns, "flsv.data.Columns(...) or its options")
    return found


NUMBERS, TRUTH, WORDS = "numbers", "truth values", "categories"
DAYS = "days"
#: Kinds of columns by the results of pandas' ``infer_dtype``.
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
#: Approximately the largest number of single precision.
LARGEST = 1e38
#: Largest number of different values that may still be categories.
FEW = 10
_LEADING_ZERO = re.compile(r"[-+]?0\d.*")
_DATES = {"date", "datetime", "Timestamp"}
_DAY = re.compile(r"\d{4}-\d\d?-\d\d?([T ].*)?|\d{1,2}[./-]\d{1,2}[./-]\d{4}( .*)?")


def parsed(values: Iterable[Any], decimal: str = ".") -> np.ndarray:
    """Convert values to numbers, float64 ``[N]``; a value that is not a finite number becomes NaN.

    Example:
        >>> parsed(["3", "-1e3", "high", "1_000", "inf", None])
        array([    3., -1000.,    nan,    nan,    nan,    nan])
        >>> parsed(["3", "3,5", "3.5"], ",")
        array([3. , 3.5, nan])
    """
    # Python reads 1_000 as a number, which is hardly meant in a table.
    wrong = "_" if decimal == "." else "_."

    def number(value: Any) -> float:
        try:
            if isinstance(value, str):
                return np.nan if any(mark in value for mark in wrong) else float(value.replace(decimal, "."))
            return float(value)
        except (TypeError, ValueError):
            return np.nan

    numbers = np.array([number(value) for value in values], dtype=np.float64)
    return np.where(np.isfinite(numbers), numbers, np.nan)


def without_gaps(table: Table, name: str, argument: str, columns: Columns) -> pd.Series:
    """Return the values of a column, with NaN for missing values and without white space around words.

    Args:
        table: the rows.
        name: name of the column.
        argument: the argument in which the user gave ``name``, for messages.
        columns: options of reading, with the marks of missing values.
    """
    column, marks = table.column(name, argument), columns.missing(name, table.typed)
    if is_numeric_dtype(column.dtype) and marks == {""}:
        return column
    words = words_of(column)
    gaps = words.isna() | words.isin(gap_words(words, marks, columns.decimal))
    values = words if _KINDS.get(infer_dtype(column, skipna=True)) == WORDS else column.astype(object)
    return values.mask(gaps)


def gap_words(words: pd.Series, marks: Collection[str], decimal: str = ".") -> set[str]:
    """Return the words of a column that equal one of the ``marks`` of a missing value, as words or as numbers.

    Example:
        >>> sorted(gap_words(pd.Series(["-99.0", "-99", "?", "1"]), {"-99", "?"}))
        ['-99', '-99.0', '?']
    """
    numbers = {number for number in parsed(marks).tolist() if number == number}
    found = words[words.isin(list(marks))].tolist()
    if numbers:
        others = [word for word in words.dropna().unique() if not _LEADING_ZERO.fullmatch(word)]
        found += [word for word, number in zip(others, parsed(others, decimal).tolist()) if number in numbers]
    return set(found)


def _kind_of_texts(texts: set[str], decimal: str) -> str:
    """Return the kind of a text file's column from its different values: numbers, truth values or words."""
    if not texts or texts <= _TRUTHS.keys():
        return TRUTH if texts else ""
    numbers = np.isfinite(parsed(texts, decimal))
    named = numbers.all() and any(map(_LEADING_ZERO.fullmatch, texts))
    return NUMBERS if numbers.any() and not named else WORDS


def read_column(table: Table, name: str, columns: Columns) -> tuple[str, pd.Series]:
    """Return the kind of a column and its values: numbers or words, and NaN for missing values.

    Raises:
        ColumnError: the column has values of several kinds, such as numbers and words, or of a kind that cannot be a
            feature, such as dates; or a number is too large for single precision.

    Example:
        >>> table = Table("a.csv", pd.DataFrame({"came": ["2024-01-30", ""], "left": ["2024-02-02"] * 2}))
        >>> kind, values = read_column(table, "left", Columns(dates={"left": "came"}))
        >>> kind, values.tolist()
        ('days since came', [3.0, nan])
    """
    since = (columns.dates or {}).get(name)
    if since is not None:
        start = np.datetime64(0, "D") if since == DAYS else dates_of(table, since, columns)
        days = (dates_of(table, name, columns) - start) / np.timedelta64(1, "D")
        return f"days since {'1970' if since == DAYS else since}", days.reset_index(drop=True)
    values = without_gaps(table, name, "features", columns).astype(object).reset_index(drop=True)
    if name in (columns.categorical or ()):
        return WORDS, words_of(values)
    inferred = _KINDS.get(infer_dtype(values, skipna=True))
    kind = inferred if table.typed else _kind_of_texts(set(values.dropna()), columns.decimal)
    dates = kind == WORDS and not table.typed and all(map(_DAY.fullmatch, values.dropna()))
    if kind is None or dates:
        raise _no_kind(table, name, values)
    _check_decimals(table, name, values, columns)
    if kind == WORDS:
        return kind, words_of(values)
    truths = _TRUTHS if kind == TRUTH else {}
    numbers = pd.Series(parsed(values.map(lambda value: truths.get(value, value)), columns.decimal))
    _check_numbers(table, name, values, numbers, columns)
    return kind or NUMBERS, numbers


def _no_kind(table: Table, name: str, values: pd.Series) -> ColumnError:
    """Return the error for a column with values of several kinds, or of a kind that cannot be a feature, such as
    dates."""
    kinds = {type(value).__name__: part.path for part in table.parts for value in part.frame[name].dropna()}
    kinds = kinds if table.typed else {"dates": table.path}
    iso = not table.typed and pd.to_datetime(values.dropna(), format="ISO8601", errors="coerce", utc=True).notna().all()
    remedy: dict[str, Any] = {"exclude": [name]}
    if iso or kinds.keys() <= _DATES:
        remedy = {"dates": {name: DAYS}}
    elif kinds.keys() <= {"int", "float", "bool", "str"}:
        remedy = {"categorical": [name]}
    return ColumnError(
        f"{name!r} has {' and '.join(f'{kind} in {path}' for kind, path in kinds.items())}; expected numbers, words or "
        f"truth values, the same in all tables. Days are counted of dates (dates: {{{name}: days}}, or the column of "
        "another date to count from; date_format says how they are written).",
        remedy,
    )


def _check_numbers(table: Table, name: str, values: pd.Series, numbers: pd.Series, columns: Columns) -> None:
    wrong = np.flatnonzero(numbers.isna() & values.notna())
    if len(wrong):
        words = sorted({str(word) for word in values[wrong]})
        remedy: dict[str, Any] = {"categorical": [name]}
        if numbers.nunique() > FEW or (numbers % 1 > 0).any():  # measured numbers are no categories
            of_others = isinstance(columns.gaps, list) or len(words) > FEW
            # For mypy: gaps are no list here.
            marks = [*(columns.gaps or {}).get(name, ()), *words] if not of_others else []  # type: ignore[union-attr]
            remedy = {"gaps": {name: marks}} if marks else {"exclude": [name]}
        where = f"{table.where(wrong[0])}: {str(values[wrong[0]])!r} in {name!r}"
        number = int(np.argmax(numbers.notna()))
        other = f"{str(values[number])!r} is ({table.where(number)})" if numbers.notna().any() else "others are"
        raise ColumnError(f"{where} is no finite number, but {other}: a gap, or a category?", remedy)
    large = np.flatnonzero(numbers.abs() > LARGEST)
    if len(large):
        where = f"{table.where(large[0])}: {numbers[large[0]]:g} in {name!r}"
        raise ColumnError(f"{where} is too large for single precision: a gap?", {"exclude": [name]})


def _check_decimals(table: Table, name: str, values: pd.Series, columns: Columns) -> None:
    """Raise ColumnError if numbers are written with the other decimal mark, because they would become categories."""
    other = "," if columns.decimal == "." else "."
    texts = {value for value in values.dropna() if isinstance(value, str)}
    strange = {text for text in texts if re.fullmatch(rf"[-+]?\d+[{other}]\d+", text)}
    alike = sorted(texts - strange)
    if not strange or np.isnan(parsed(alike, columns.decimal)).any():
        return
    row = int(np.flatnonzero(values.isin(strange))[0])
    where = f"{table.where(row)}: {values[row]!r} in {name!r}"
    pointed = next((text for text in alike if columns.decimal in text), None)
    if table.typed or other == "." or pointed is not None:
        also = "" if pointed is None else f", and {pointed!r} is one, too"
        raise ColumnError(f"{where} is a number as text{also}: write all numbers alike.", {"exclude": [name]})
    raise ColumnError(f"{where} has a decimal comma (decimal: ',').", {"decimal": ","})


def dates_of(table: Table, name: str, columns: Columns) -> pd.Series:
    """Return the dates of a column; times with a time zone are converted to UTC.

    Raises:
        ColumnError: a value is not a date.
    """
    values = without_gaps(table, name, "dates", columns)
    if is_datetime64_any_dtype(table.column(name, "dates")):
        dated = pd.to_datetime(values, utc=True)  # as for text: every day has 24 hours, also where clocks change
    else:
        texts = words_of(values)
        dated = pd.to_datetime(texts, format=columns.date_format or "ISO8601", errors="coerce", utc=True)
        wrong = np.flatnonzero(dated.isna() & texts.notna())
        if len(wrong):
            where = f"{table.where(wrong[0])}: {texts.iloc[wrong[0]]!r} in {name!r}"
            expected = f"no date as {columns.date_format or 'YYYY-MM-DD'}: say date_format, such as '%d.%m.%Y'"
            raise ColumnError(f"{where} is {expected}.", {"exclude": [name]})
    return dated.dt.tz_localize(None).astype("datetime64[us]")
