"""Which columns of a table are used, and how: numbers, truth values, words, or dates; and what rows are told apart by:
the classes and numbers to predict, and the groups that are clients."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeAlias

import numpy as np
import pandas as pd
import torch
from annotated_types import Ge
from lightning.pytorch.utilities import rank_zero_warn
from pandas.api.types import infer_dtype, is_datetime64_any_dtype, is_numeric_dtype
from torch import Tensor

from flsv.arguments import check_kind
from flsv.data.groups import check_spelling
from flsv.data.sources.table import Table, words_of
from flsv.declared import Rules, checked
from flsv.errors import ColumnError, ConfigurationError, listed

GAPS = ("", "NA", "N/A", "NaN", "nan", "null", ".", "?")


@checked
@dataclass
class Columns:
    """How the columns of a table become inputs and targets.

    What a column holds is decided once, over the tables of all clients and of the server together. A file's column is
    of numbers if all that is in it are, gaps aside, and none begins with a zero that a number would lose (``01234``);
    of truth values, which are one number, 0 or 1, if all are ``True`` or ``False``; else of words. Columns of a Parquet
    file or a DataFrame are what they are there: words stay words, whatever they look like, pandas' categories stay
    categories, and a gap is what is one there (``None``, NaN) or a blank word. What was taken for what is logged.

    ``dates`` says what becomes of a column of dates, which are refused otherwise: days since 1970, days since another
    column's date (a stay from ``{"left": "came"}``). What cannot be used is said of all columns at once, with the
    options that would do.

    Numbers are standardized, and a gap becomes 0, the mean. Other columns are one-hot; a gap, or a category that no
    training row has, is a row of zeros. A column with a gap among the training rows gets another one, 1 where the gap
    is. Rows without a target are left out, with a warning.

    Only training rows tell means, deviations and categories, those of all clients together: everybody's rows influence
    everybody's features a little, and in a federation of several machines the clients would have to send, for each
    column, how many values they have, their sum and their sum of squares. All agree beforehand on the columns, the
    categories' names (the union of what the clients' training rows have), the classes' names (the union over all rows)
    and which columns have gaps.

    A number to predict is as in the table, or, with ``standardize_target``, less the mean and over the deviation of all
    training rows': squared errors are shares of its variance
    then. Otherwise a network starts far from the mean, and what everybody's training gains first, is the mean.

    Args:
        task: ``"classification"``, the target's values are classes, or ``"regression"``.
        features: columns to predict from; None: all others, with identifiers and what came after the target.
        exclude: columns to leave out of these; not every client's table needs to have them.
        categorical: columns whose numbers are names of categories.
        gaps: what a missing value looks like, besides white space around it; None for :data:`GAPS` in a file of text,
            and nothing more in a DataFrame. Of a dictionary, what it looks like in these columns besides.
        standardize_target: for regression.
        max_categories: how many categories a column may have; more are taken for a mistake.
        delimiter: one character between values of a file.
        dates: for a column of dates ``"days"``, or the column of dates from which days are counted.
        date_format: how dates are written, as of ``strftime``; None: ISO 8601, ``2024-03-31``.

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
    dates: dict[str, str] | None = None
    date_format: str | None = None

    def missing(self, name: str, typed: bool = False) -> set[str]:
        """What stands for a gap in a column; ``typed``: of an object with columns, which has gaps of its own."""
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
        """The options that differ from their defaults, and those with which columns can be used that could not."""
        options = {each.name: getattr(self, each.name) for each in fields(self)}
        options = {name: value for name, value in options.items() if value and value != getattr(Columns, name)}
        for problem in problems:
            for name, value in problem.remedy.items():
                held = options.get(name, type(value)())
                options[name] = [*held, *value] if isinstance(value, list) else {**held, **value}
        return options


def _texts(given: Any) -> list[str] | None:
    given = [given] if isinstance(given, str) else given
    return None if given is None else [str(each).strip() for each in given]


if TYPE_CHECKING:
    GivenColumns: TypeAlias = Columns | Mapping[str, Any] | None
else:
    GivenColumns = Columns | None  # what the command line makes: an option for each of theirs


def columns_of(given: GivenColumns) -> Columns:
    """What was given, or the options of it."""
    found = Columns(**given) if isinstance(given, Mapping) else given or Columns()
    check_kind("columns", "columns", found, Columns, "flsv.data.Columns(...) or its options")
    return found


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
_DATES = {"date", "datetime", "Timestamp"}
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
    values = words if _KINDS.get(infer_dtype(column, skipna=True)) == WORDS else column.astype(object)
    return values.mask(gaps)


def _kind_of_texts(texts: set[str]) -> str:
    """What a file's column is taken for, by its different values."""
    if not texts or texts <= _TRUTHS.keys():
        return TRUTH if texts else ""
    numbers = np.isfinite(parsed(texts))
    named = numbers.all() and any(map(_LEADING_ZERO.fullmatch, texts))
    return NUMBERS if numbers.any() and not named else WORDS


def read_column(table: Table, name: str, columns: Columns) -> tuple[str, pd.Series]:
    """What a column holds, and its values, numbers or words, NaN for a gap.

    Raises:
        ColumnError: of several kinds, or of one that is no feature, such as dates; numbers and words in one column; a
            number too large for single precision.

    Example:
        >>> table = Table("a.csv", pd.DataFrame({"came": ["2024-01-30", ""], "left": ["2024-02-02"] * 2}))
        >>> kind, values = read_column(table, "left", Columns(dates={"left": "came"}))
        >>> kind, values.tolist()
        ('days since came', [3.0, nan])
    """
    since = (columns.dates or {}).get(name)
    if since is not None:
        start = np.datetime64(0, "D") if since == DAYS else _days(table, since, columns)
        days = (_days(table, name, columns) - start) / np.timedelta64(1, "D")
        return f"days since {'1970' if since == DAYS else since}", days.reset_index(drop=True)
    values = without_gaps(table, name, "features", columns).astype(object).reset_index(drop=True)
    if name in (columns.categorical or ()):
        return WORDS, words_of(values)
    kind = _KINDS.get(infer_dtype(values, skipna=True)) if table.typed else _kind_of_texts(set(values.dropna()))
    if kind is None or (kind == WORDS and not table.typed and all(map(_DAY.fullmatch, values.dropna()))):
        raise _no_kind(table, name, values)
    if kind == WORDS:
        return kind, words_of(values)
    numbers = pd.Series(parsed(values.map(lambda value: _TRUTHS.get(value, value)) if kind == TRUTH else values))
    _check_numbers(table, name, values, numbers, columns)
    return kind or NUMBERS, numbers


def _no_kind(table: Table, name: str, values: pd.Series) -> ColumnError:
    """The error of a column that is of several kinds, or of one that is no feature, such as dates."""
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
        words = {str(word) for word in values[wrong]}
        remedy: dict[str, Any] = {"categorical": [name]}
        if len(words) == 1 and numbers.nunique() > FEW:  # one word among many numbers is a gap, in this column
            remedy = {"exclude": [name]} if isinstance(columns.gaps, list) else {"gaps": {name: [*words]}}
        where = f"{table.where(wrong[0])}: {str(values[wrong[0]])!r} in {name!r}"
        raise ColumnError(f"{where} is no finite number, but others there are: a gap, or a category?", remedy)
    large = np.flatnonzero(numbers.abs() > LARGEST)
    if len(large):
        where = f"{table.where(large[0])}: {numbers[large[0]]:g} in {name!r}"
        raise ColumnError(f"{where} is too large for single precision: a gap?", {"exclude": [name]})


def _days(table: Table, name: str, columns: Columns) -> pd.Series:
    values = without_gaps(table, name, "dates", columns)
    if is_datetime64_any_dtype(table.column(name, "dates")):
        dated = pd.to_datetime(values)
    else:
        texts = words_of(values)
        dated = pd.to_datetime(texts, format=columns.date_format or "ISO8601", errors="coerce", utc=True)
        wrong = np.flatnonzero(dated.isna() & texts.notna())
        if len(wrong):
            where = f"{table.where(wrong[0])}: {texts.iloc[wrong[0]]!r} in {name!r}"
            expected = f"no date as {columns.date_format or 'YYYY-MM-DD'}: say date_format, such as '%d.%m.%Y'"
            raise ColumnError(f"{where} is {expected}.", {"exclude": [name]})
    return dated.dt.tz_localize(None).astype("datetime64[us]")


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
    check_spelling(names, f"{table.path}: {name!r} (group)", refuse=False)
    return values.map(dict(zip(names, natural_order(names)))).to_numpy()


def class_names(table: Table, name: str, argument: str) -> tuple[str, ...]:
    """The different values of a column in their natural order.

    Raises:
        ConfigurationError: one only, nearly as many as there are rows, or several that are one to a person; numbers in
            one table and words in another, of which ``1`` and ``True`` would be two classes.

    Example:
        >>> import pandas as pd
        >>> class_names(Table("wards.csv", pd.DataFrame({"ill": ["10", "2", "2", "10", "2"]})), "ill", "target")
        ('2', '10')
    """
    about = f"{argument} {name!r}"
    numeric = {part.path: np.isfinite(parsed(words_of(part.column(name, argument)).unique())) for part in table.parts}
    numbers = next((path for path, each in numeric.items() if each.all()), None)
    others = next((path for path, each in numeric.items() if not each.any()), None)
    if numbers is not None and others is not None:
        raise ConfigurationError(f"{about} has numbers in {numbers} and words in {others}: write the classes alike.")
    values = words_of(table.column(name, argument))
    names = tuple(map(str, sorted(natural_order(values.unique().tolist()))))  # type: ignore[type-var]
    if len(names) < 2 or len(names) > max(2, len(values) // 2):
        raise ConfigurationError(
            f"{table.path}: {about} has {len(names)} different values in {len(values)} rows, which are no classes. "
            "Name another column; for numbers, a table has task: regression."
        )
    check_spelling(names, f"{table.path}: {about}")
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
            f"{table.where(unknown[0])}: {values.iloc[unknown[0]]!r} in {argument} {name!r} is none of "
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
    wrong = np.flatnonzero(~(np.abs(numbers) <= LARGEST))
    if len(wrong):
        where = f"{table.where(wrong[0])}: {str(column.iloc[wrong[0]])!r} in {name!r} (target)"
        raise ConfigurationError(f"{where} is no finite number, as {len(wrong)} of {len(table)}: a class, or a gap?")
    return numbers
