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

from flsv.data.sources.notation import are_dates, column_numbers, date_formats, dated, other_notations, parsed
from flsv.data.sources.table import Table, by_file, texts_by_file, words_of
from flsv.utilities.declared import Rules, check_argument, checked
from flsv.utilities.errors import ColumnError, ConfigurationError, listed

GAPS = ("", "NA", "N/A", "NaN", "nan", "null", ".", "?")


@checked
@dataclass
class Columns:
    """Options that turn the columns of a table into inputs and targets.

    The kind of a column is decided once, for the tables of all clients and of the server together. In a text file a
    column has numbers if all its values except missing ones are numbers and none begins with a zero that a number would
    lose (``01234``). It has truth values, which become one number, 0 or 1, if all are ``True`` or ``False``. Otherwise
    it has words. Columns of a Parquet file or a DataFrame keep their type: words stay words even if they look like
    numbers, pandas' categories stay categories, and missing values are ``None``, NaN and blank words. The kinds are
    logged.

    Columns of dates are refused unless ``dates`` converts them to days since 1970 or since another column's date (the
    length of a stay from ``{"left": "came"}``). One message reports all unusable columns, with options to paste.

    Numbers are standardized, and a missing value becomes 0, the mean. Words are one-hot encoded; a missing value, or a
    category that no training row has, becomes zeros. A column with a missing value in a training row adds a feature
    that is 1 for rows without a value and 0 for others. Rows without a target are left out, with a warning.

    Means, deviations and categories are fitted on all clients' training rows together. So every client's rows have a
    small influence on the other clients' features; on several machines the clients would have to send the count, the
    sum and the sum of squares of each column. The clients have to agree beforehand on the columns, the categories'
    names (the union over the clients' training rows), the classes' names (the union over all rows) and which columns
    have missing values.

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
        delimiter: character between the values in a file; if the header does not contain it, a semicolon, tab or
            vertical bar in the header is used.
        decimal: decimal mark of numbers in a file. With ``","``, ``"12,5"`` is a number, and so is ``"12.5"``, whose
            point cannot separate thousands.
        thousands: thousands separator of numbers in a file: with ``"."``, ``"1.234,5"`` is 1234.5. None: numbers have
            none.
        encoding: encoding of the text files that are not in UTF-8, such as ``cp1252`` of Windows in Western Europe.
        dates: ``{column: start}`` for columns of dates, which become numbers of days: since 1970 if ``start`` is
            ``"days"``, else since the date in the column ``start``.
        date_format: formats of dates, as for ``strftime``, such as ``"%d.%m.%Y"``, besides ISO 8601 (``2024-03-31``).
        classes: names of all classes; None: all labels in the tables, which then have to share labels. Any other label
            is refused.

    Raises:
        ConfigurationError: arguments are out of range or contradict each other.
    """

    rules: ClassVar[Rules] = (
        (
            lambda a: not a.standardize_target or a.task == "regression",
            "standardize_target is for task: regression; classes have no mean.",
        ),
        (lambda a: a.thousands != a.decimal, "a mark cannot separate both thousands and decimals."),
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
    thousands: Literal[".", ",", " ", "'"] | None = None
    encoding: str | None = None
    dates: dict[str, str] | None = None
    date_format: list[str] | str | None = None
    classes: list[str] | None = None

    def missing(self, name: str, typed: bool = False) -> set[str]:
        """Return the texts that mark a missing value in the column ``name``; with ``typed`` it is a column of a
        DataFrame or Parquet file."""
        usual = () if typed else GAPS
        if isinstance(self.gaps, dict):
            return {"", *usual, *self.gaps.get(name, ())}
        return {"", *(usual if self.gaps is None else self.gaps)}

    def __post_init__(self) -> None:
        # Columns of a DataFrame may be called by numbers.
        self.features, self.exclude = _texts(self.features), _texts(self.exclude)
        self.categorical, self.date_format = _texts(self.categorical), _texts(self.date_format)
        self.classes = _texts(self.classes)
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
            raise ConfigurationError(f"Columns: {twice!r} is the target or the group, and cannot have another role.")

    def remedied(self, problems: Iterable[ColumnError]) -> dict[str, Any]:
        """Return ``{option: value}`` for the user to paste: the options that differ from their defaults, with the
        changes that may solve the ``problems``."""
        options = {each.name: getattr(self, each.name) for each in fields(self)}
        options = {name: value for name, value in options.items() if value not in (None, {}, getattr(Columns, name))}
        for problem in problems:
            for name, value in problem.remedy.items():
                held = options.get(name, type(value)())
                if isinstance(value, list):
                    value = list(dict.fromkeys([*held, *value]))
                options[name] = {**held, **value} if isinstance(value, dict) else value
        if options.get("thousands") == options.get("decimal", "."):  # two columns contradict each other
            del options["thousands"]
        return options


def _texts(given: Any) -> list[str] | None:
    given = [given] if isinstance(given, str) else given
    return None if given is None else [str(each).strip() for each in given]


if TYPE_CHECKING:
    GivenColumns: TypeAlias = Columns | Mapping[str, Any] | None
else:
    GivenColumns = Columns | None  # which the command line takes apart into options


def as_columns(given: GivenColumns) -> Columns:
    """Return ``given`` as ``Columns``: a dictionary is converted, and None becomes the defaults."""
    found = Columns(**given) if isinstance(given, Mapping) else given or Columns()
    return check_argument("columns", "columns", found, Columns)


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
_TO_DAYS = "Convert dates to days (dates: {{{}: days}}), or to days since the date in another column."


def without_gaps(table: Table, name: str, argument: str, columns: Columns) -> pd.Series:
    """Return a column's values, with NaN for marks of missing values and no white space around words."""
    column, marks = table.column(name, argument), columns.missing(name, table.typed)
    if is_numeric_dtype(column.dtype) and marks == {""}:
        return column
    words = words_of(column)
    gaps = words.isna() | words.isin(list(gap_words(words, marks, columns.decimal)))
    values = (
        words if not table.typed or _KINDS.get(infer_dtype(column, skipna=True)) == WORDS else column.astype(object)
    )
    return values.mask(gaps)


def gap_words(words: pd.Series, marks: Collection[str], decimal: str = ".") -> set[str]:
    """Return the words of a column that equal one of the ``marks`` of a missing value, as words or as numbers."""
    distinct = set(words.dropna())
    numbers = {number for number in parsed(marks).tolist() if number == number}
    found = distinct.intersection(marks)
    if numbers:
        others = [word for word in distinct if not _LEADING_ZERO.fullmatch(word)]
        found |= {word for word, number in zip(others, parsed(others, decimal).tolist()) if number in numbers}
    return found


def _kind_and_numbers(table: Table, values: pd.Series, columns: Columns) -> tuple[str | None, pd.Series]:
    """Return a column's kind, None for several or an unusable one, and its values as numbers, NaN for what is none."""
    if table.typed:
        return _KINDS.get(infer_dtype(values, skipna=True)), pd.Series(parsed(values))  # truth values, too
    # Each file may have its own notation of numbers.
    parts = [column_numbers(each, columns.decimal, columns.thousands) for each in by_file(table, values)]
    numbers, texts = pd.Series(np.concatenate(parts)), values.dropna()
    if _TRUTHS.keys() >= set(texts):
        return TRUTH if len(texts) else "", values.map(_TRUTHS)
    known = np.isfinite(numbers[values.notna()])
    named = known.all() and any(map(_LEADING_ZERO.fullmatch, texts))
    return NUMBERS if known.any() and not named else WORDS, numbers


def read_column(table: Table, name: str, columns: Columns) -> tuple[str, pd.Series]:
    """Return the kind of a column and its values: numbers or words, and NaN for missing values."""
    since = (columns.dates or {}).get(name)
    if since is not None:
        start = np.datetime64(0, "D") if since == DAYS else dates_of(table, since, columns)
        days = (dates_of(table, name, columns) - start) / np.timedelta64(1, "D")
        return f"days since {'1970' if since == DAYS else since}", days.reset_index(drop=True)
    values = without_gaps(table, name, "features", columns).astype(object).reset_index(drop=True)
    if name in (columns.categorical or ()):
        return WORDS, words_of(values)
    there = values.notna()
    kind, numbers = _kind_and_numbers(table, values, columns)
    if kind is None or (kind == WORDS and not table.typed and are_dates(values[there])):
        raise _no_kind(table, name, values, columns)
    if kind == WORDS or not numbers[there].notna().all():
        _check_notation(table, name, values, columns)
    if kind == WORDS:
        return kind, words_of(values)
    _check_numbers(table, name, values, numbers, columns)
    return kind or NUMBERS, numbers


def _no_kind(table: Table, name: str, values: pd.Series, columns: Columns) -> ColumnError:
    """Return the error for a column with values of several kinds, or of a kind that cannot be a feature, such as
    dates."""
    texts = values.dropna()
    if not table.typed:
        known = columns.date_format or ()
        parts = texts_by_file(table, values)
        formats = date_formats(parts, known)
        about = f"{table.path}: {name!r} has dates, such as {texts.iloc[0]!r}"
        if formats is None:
            files = [part.path for part, held in zip(table.parts, parts) if date_formats([held], known) is None]
            return ColumnError(
                f"{about}. Whether the day or the month comes first is not clear in {listed(files) or table.path}: set "
                f"date_format, such as '%d/%m/%Y', with dates: {{{name}: days}}.",
                {"exclude": [name]},
            )
        remedy: dict[str, Any] = {"dates": {name: DAYS}, **({"date_format": formats} if formats else {})}
        return ColumnError(f"{about}. {_TO_DAYS.format(name)}", remedy)
    kinds = {type(value).__name__: part.path for part in table.parts for value in part.frame[name].dropna()}
    remedy = {"exclude": [name]}
    if kinds.keys() <= _DATES:
        remedy = {"dates": {name: DAYS}}
    elif kinds.keys() <= {"int", "float", "bool", "str"}:
        remedy = {"categorical": [name]}
    to_days = f" {_TO_DAYS.format(name)}" if "dates" in remedy else ""
    return ColumnError(
        f"{name!r} has {' and '.join(f'{kind} in {path}' for kind, path in kinds.items())}; expected numbers, words or "
        f"truth values, of the same kind in all tables.{to_days}",
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
        raise ColumnError(f"{where} is not a valid number, but {other}: a missing value, or a category?", remedy)
    large = np.flatnonzero(numbers.abs() > LARGEST)
    if len(large):
        where = f"{table.where(large[0])}: {numbers[large[0]]:g} in {name!r}"
        raise ColumnError(f"{where} is too large for single precision: a missing value?", {"exclude": [name]})


def _check_notation(table: Table, name: str, values: pd.Series, columns: Columns) -> None:
    """Raise ColumnError if texts are numbers in another notation, which would be read as categories."""
    texts = [sorted({*part}) for part in texts_by_file(table, values)]
    like, notations = other_notations(texts, columns.decimal, columns.thousands)
    if not like:
        return
    row = int(np.flatnonzero(values.isin(like))[0])
    where = f"{table.where(row)}: {values[row]!r} in {name!r}"
    found = " or ".join(", ".join(f"{option}: {mark!r}" for option, mark in each.items()) for each in notations)
    if len(notations) == 1 and not table.typed:
        marks = {"decimal": "a decimal comma", "thousands": "thousands separators"}
        has = " and ".join(marks[option] for option in notations[0])
        raise ColumnError(f"{where} has {has} ({found}).", notations[0])
    why = f"several notations are possible ({found})" if found else "others are in another notation"
    why = "stored as text" if table.typed else why
    message = f"{where} is a number, but {why}. Write all numbers in the same notation, or store them as numbers."
    raise ColumnError(message, {"exclude": [name]})


def dates_of(table: Table, name: str, columns: Columns) -> pd.Series:
    """Return a column's dates, in UTC where they have a time zone."""
    values = without_gaps(table, name, "dates", columns)
    if is_datetime64_any_dtype(table.column(name, "dates")):
        found = pd.to_datetime(values, utc=True)  # as for text: every day has 24 hours, also where clocks change
    else:
        texts = words_of(values)
        found = dated(texts, columns.date_format or ())
        wrong = np.flatnonzero(found.isna() & texts.notna())
        if len(wrong):
            where = f"{table.where(wrong[0])}: {texts.iloc[wrong[0]]!r} in {name!r}"
            formats = listed(["YYYY-MM-DD", *(columns.date_format or ())], show=str)
            given = columns.date_format or ()
            more = date_formats(texts_by_file(table, texts), given) if are_dates(texts.dropna()) else None
            raise ColumnError(
                f"{where} is not a date, or an ambiguous one, in the formats {formats}: set date_format.",
                {"date_format": more} if more else {"exclude": [name]},
            )
    return found.dt.tz_localize(None).astype("datetime64[us]")
