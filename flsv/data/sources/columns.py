"""Options of a table's columns, and reading of one column: numbers, truth values, words, or dates."""

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

    Numbers are standardized, and a gap becomes 0, the mean. Other columns are one-hot; a gap, or a category that no
    training row has, is a row of zeros. A column with a gap among the training rows gets another one, 1 where the gap
    is. Rows without a target are left out, with a warning.

    Means, deviations and categories are fitted on all clients' training rows together. So every client's rows influence
    the others' features a little; on several machines the clients would have to send the count, the sum and the sum of
    squares of each column. The clients have to agree beforehand on the columns, the categories' names (the union over
    the clients' training rows), the classes' names (the union over all rows) and which columns have gaps.

    A number to predict stays as in the table, or, with ``standardize_target``, the training rows' mean is subtracted
    and it is divided by their deviation: squared errors are then shares of its variance. Without it a network starts
    far from the mean, and the first gain of every client's training is to learn the mean.

    Args:
        task: ``"classification"`` if the target's values are classes, or ``"regression"``.
        features: columns to predict from; None: all others, also identifiers and columns known only after the target.
        exclude: columns to leave out; not every client's table needs to have them.
        categorical: columns whose numbers are names of categories.
        gaps: marks of a missing value, besides blanks; None for :data:`GAPS` in a file of text, and no more marks in a
            DataFrame. A dictionary adds marks for its columns. Numbers match however they are written: ``-99`` is
            ``-99.0``, too.
        standardize_target: subtract the mean of a regression's target and divide by its deviation.
        max_categories: how many categories a column may have; more are taken for a mistake.
        delimiter: one character between values of a file.
        decimal: decimal mark of numbers in a file; ``"12,5"`` is a number only with ``","``, and with it ``"12.5"`` and
            ``"1.234,5"`` are none.
        dates: for a column of dates ``"days"``, or the column of dates from which days are counted.
        date_format: format of dates, as of ``strftime``; None: ISO 8601, ``2024-03-31``.

    Raises:
        ConfigurationError: arguments out of range or that contradict each other.
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
        """Return the marks of a gap in a column; with ``typed``, of an object with columns, which has its own gaps."""
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
        """Raise ConfigurationError where a column has two roles."""
        used = [*(self.features or ()), *(self.categorical or ()), *(self.dates or ())]
        twice = next((name for name in (target, group) if name in used or target == group), None)
        if twice is not None:
            raise ConfigurationError(f"Columns: {twice!r} is the target or the group, and cannot be anything else.")

    def remedied(self, problems: Iterable[ColumnError]) -> dict[str, Any]:
        """Return the options that differ from their defaults, with those added that solve the problems."""
        options = {each.name: getattr(self, each.name) for each in fields(self)}
        options = {name: value for name, value in options.items() if value not in (None, {}, getattr(Columns, name))}
        for problem in problems:
            for name, value in problem.remedy.items():
                held = options.get(name, type(value)())
                if isinstance(value, list):
                    value = list(dict.fromkeys([*held, *value]))
                options[name] = {**held, **value} if isinstance(value, dict) else value
        # A column that is left out after another remedy failed, needs no other option.
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
    """Convert a dictionary of options to ``Columns``; None gives the defaults."""
    found = Columns(**given) if isinstance(given, Mapping) else given or Columns()
    check_kind("columns", "columns", found, Columns, "flsv.data.Columns(...) or its options")
    return found


NUMBERS, TRUTH, WORDS = "numbers", "truth values", "categories"
DAYS = "days"
#: Kinds by the names of pandas' ``infer_dtype``.
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
#: Largest number, nearly, of single precision.
LARGEST = 1e38
#: Largest number of different values that may still be categories.
FEW = 10
_LEADING_ZERO = re.compile(r"[-+]?0\d.*")
_DATES = {"date", "datetime", "Timestamp"}
_DAY = re.compile(r"\d{4}-\d\d?-\d\d?([T ].*)?|\d{1,2}[./-]\d{1,2}[./-]\d{4}( .*)?")


def parsed(values: Iterable[Any], decimal: str = ".") -> np.ndarray:
    """Convert values to numbers, float64 ``[N]``; NaN where one is no finite number.

    Example:
        >>> parsed(["3", "-1e3", "high", "1_000", "inf", None])
        array([    3., -1000.,    nan,    nan,    nan,    nan])
        >>> parsed(["3", "3,5", "3.5"], ",")
        array([3. , 3.5, nan])
    """
    # Python reads 1_000 as a number, which a table hardly means.
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
    """Return a column's values, NaN where one is missing; words without white space around them."""
    column, marks = table.column(name, argument), columns.missing(name, table.typed)
    if is_numeric_dtype(column.dtype) and marks == {""}:
        return column
    words = words_of(column)
    gaps = words.isna() | words.isin(gap_words(words, marks, columns.decimal))
    values = words if _KINDS.get(infer_dtype(column, skipna=True)) == WORDS else column.astype(object)
    return values.mask(gaps)


def gap_words(words: pd.Series, marks: Collection[str], decimal: str = ".") -> set[str]:
    """Find the words of a column that equal one of these marks, as words or as numbers.

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
    """Return the kind of a text file's column, by its different values."""
    if not texts or texts <= _TRUTHS.keys():
        return TRUTH if texts else ""
    numbers = np.isfinite(parsed(texts, decimal))
    named = numbers.all() and any(map(_LEADING_ZERO.fullmatch, texts))
    return NUMBERS if numbers.any() and not named else WORDS


def read_column(table: Table, name: str, columns: Columns) -> tuple[str, pd.Series]:
    """Read a column: return its kind and its values, numbers or words, NaN for a gap.

    Raises:
        ColumnError: a column of several kinds, or of one that is no feature, such as dates; numbers and words in one
            column; a number too large for single precision.

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
    """Make the error of a column of several kinds, or of one that is no feature, such as dates."""
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
    """Refuse numbers that are written with the other decimal mark: as words they would be categories."""
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
    """Read a column's dates; times with a time zone are converted to UTC.

    Raises:
        ColumnError: a value that is no date.
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
