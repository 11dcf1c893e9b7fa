"""Options of a table's columns, and functions that read numbers, truth values, words, or dates."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from itertools import compress
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeAlias

import numpy as np
import pandas as pd
from annotated_types import Ge
from pandas.api.types import infer_dtype, is_datetime64_any_dtype, is_numeric_dtype

from flsv.data.groups import check_spelling
from flsv.data.sources.agreed import LARGEST_NUMBER, AgreedEncoder, read_encoder_file
from flsv.data.sources.frames import (
    as_categories,
    as_texts,
    by_distinct_text,
    by_file,
    category_names,
    places_of_words,
    texts_by_file,
)
from flsv.data.sources.notation import (
    are_dates,
    column_numbers,
    date_formats,
    other_notations,
    parse_dates,
    parse_numbers,
    plain_numbers,
    text_with_ambiguous_point,
)
from flsv.data.sources.table import Table
from flsv.utilities.declared import Count, Rules, check_argument, checked
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
    numbers, pandas' categories stay categories, and missing values are ``None``, NaN and blank words.

    Columns of dates are refused unless ``dates`` converts them to days since 1970 or since another column's date (the
    length of a stay from ``{"left": "came"}``).

    Numbers are standardized, and a missing value becomes 0, the mean. Words are one-hot encoded, a missing or unknown
    one as zeros. Words that differ in case, white space or a full stop only are refused. A column with a missing value
    in a training row adds a feature that is 1 for rows without a value. Rows without a target are left out, with a
    warning.

    Means, deviations and categories are fitted on all clients' training rows together. On several machines each site
    tells counts and sums (:class:`~flsv.data.sources.agreed.TableSummary`). Sums are exact, so that the features are
    the same to the bit in one process.

    A number to predict stays as in the table. With ``standardize_target`` squared errors are shares of its variance.

    Args:
        task: ``"classification"`` if the target's values are classes, or ``"regression"``.
        features: columns to predict from. None: all columns except the target and the group, even identifiers.
        exclude: columns to leave out. Some tables may lack them.
        categorical: columns whose numbers are names of categories.
        gaps: marks of a missing value besides blanks. None: :data:`GAPS` in a text file, no marks in a DataFrame. A
            dictionary ``{column: marks}`` adds marks for some columns. Numbers match in every notation: ``-99`` also
            matches ``-99.0``.
        standardize_target: whether to subtract the mean of a regression's target and divide by its standard deviation.
        max_categories: largest number of categories of a column. A column with more is refused.
        decimal: decimal mark of numbers in a file. With ``","``, ``"12,5"`` is a number, and so is ``"12.5"``, whose
            point cannot separate thousands.
        thousands: thousands separator of numbers in a file: with ``"."``, ``"1.234,5"`` is 1234.5. None: numbers have
            none, and a column whose points may separate thousands is refused.
        encoding: encoding of the text files that are not in UTF-8, such as ``cp1252`` of Windows in Western Europe.
        dates: ``{column: start}`` for columns of dates, which become days since 1970 if ``start`` is ``"days"``, else
            since the date in the column ``start``.
        date_format: formats of dates, as for ``strftime``, such as ``"%d.%m.%Y"``, besides ISO 8601 (``2024-03-31``).
        classes: names of all classes. None: all labels in the tables, which then have to share labels. Any other label
            is refused.
        min_rows: smallest number of a client's rows of which the client tells something. Categories, classes, numbers
            or missing values of fewer rows count as if the client had none. A class that no client tells is refused,
            unless ``classes`` names it.
        encoder: an encoder that was agreed on beforehand, as ``encoder.json`` of an earlier run has it, or its file.
            Then nothing is fitted, and no site tells anything about its table. If it names the ``target`` it is a data
            dictionary, as ``flsv data --write`` drafts it: cells that do not fit are refused.

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
    decimal: Literal[".", ","] = "."
    thousands: Literal[".", ",", " ", "'"] | None = None
    encoding: str | None = None
    dates: dict[str, str] | None = None
    date_format: list[str] | str | None = None
    classes: list[str] | None = None
    min_rows: Count = 1
    encoder: dict[str, Any] | str | None = None

    def missing(self, name: str, typed: bool = False) -> set[str]:
        """Return the texts that mark a missing value in the column ``name``.

        With ``typed`` the column is from a DataFrame or Parquet file.
        """
        default_marks = () if typed else GAPS
        marks_of_column: Sequence[str] = ()
        if self.agreed is not None:
            marks_of_column = self.agreed.gap_marks(name)
        if isinstance(self.gaps, dict):
            return {"", *default_marks, *marks_of_column, *self.gaps.get(name, ())}
        marks = default_marks if self.gaps is None else self.gaps
        return {"", *marks, *marks_of_column}

    def __post_init__(self) -> None:
        # Columns of a DataFrame may be called by numbers.
        self.features = _texts(self.features)
        self.exclude = _texts(self.exclude)
        self.categorical = _texts(self.categorical)
        self.date_format = _texts(self.date_format)
        self.classes = _texts(self.classes)
        dates = self.dates or {}
        self.dates = {str(name).strip(): origin.strip() for name, origin in dates.items()}
        if isinstance(self.gaps, Mapping):
            self.gaps = {
                str(name).strip(): _texts(marks) or [] for name, marks in self.gaps.items()
            }
        else:
            self.gaps = _texts(self.gaps)

        self.agreed: AgreedEncoder | None = None
        if isinstance(self.encoder, str):
            self.encoder = read_encoder_file(self.encoder)
        if self.encoder is not None:
            self.agreed = AgreedEncoder.from_plain(self.encoder)
            has_classes = self.agreed.classes is not None
            if has_classes != (self.task == "classification"):
                raise ConfigurationError(
                    f"Columns(task={self.task!r}): its encoder has classes {self.agreed.classes}."
                )

    def __repr__(self) -> str:
        """Show all options but newer ones that have their defaults: runs are resumed only with the same text."""
        hidden_at_default = ("min_rows", "encoder")
        shown = []
        for option in fields(self):
            value = getattr(self, option.name)
            if option.name not in hidden_at_default or value != option.default:
                shown.append(f"{option.name}={value!r}")
        return f"Columns({', '.join(shown)})"

    def check_roles(self, target: str, group: str | None) -> None:
        """Raise ConfigurationError if the column ``target`` or ``group`` has another role as well."""
        feature_names: list[str] = []
        for names in (self.features, self.categorical, self.dates):
            feature_names += names or ()
        if target == group or target in feature_names:
            name_of_two_roles = target
        elif group in feature_names:
            name_of_two_roles = group
        else:
            return
        raise ConfigurationError(
            f"Columns: {name_of_two_roles!r} is the target or the group, and cannot have another role."
        )

    def with_remedies(self, problems: Iterable[ColumnError]) -> dict[str, Any]:
        """Return the options that differ from their defaults, with changes that may solve ``problems``."""
        options: dict[str, Any] = {}
        for option in fields(self):
            value = getattr(self, option.name)
            default = getattr(Columns, option.name)
            is_set = value not in (None, {}) and value != default
            if is_set:
                options[option.name] = value

        for problem in problems:
            for name, remedy in problem.remedy.items():
                if isinstance(remedy, list):
                    merged = [*options.get(name, ()), *remedy]
                    options[name] = list(dict.fromkeys(merged))
                elif isinstance(remedy, dict):
                    options[name] = {**options.get(name, {}), **remedy}
                else:
                    options[name] = remedy
        return options


def _texts(texts: Any) -> list[str] | None:
    if texts is None:
        return None
    if isinstance(texts, str):
        texts = [texts]
    return [str(text).strip() for text in texts]


if TYPE_CHECKING:
    GivenColumns: TypeAlias = Columns | Mapping[str, Any] | None
else:
    GivenColumns = Columns | None  # which the command line takes apart into options


def as_columns(options: GivenColumns) -> Columns:
    """Convert options in a dictionary to ``Columns``. None gives the defaults."""
    if isinstance(options, Mapping):
        columns = Columns(**options)
    else:
        columns = options or Columns()
    return check_argument("columns", "columns", columns, Columns)


@dataclass(frozen=True)
class ColumnCard:
    """Record of a table's column: its kind and its values.

    Args:
        name: the column's name.
        kind: its kind, such as ``"numbers"`` or ``"categories"``.
        values: numbers or words, ``[N]``, NaN for missing values: of all rows while a table is read, of the training
            samples in :class:`SourceData`.
        categories: the different words of the training rows, sorted, or None.
    """

    name: str
    kind: str
    values: pd.Series
    categories: Sequence[str] | None = None

    @property
    def became(self) -> str:
        """Features that the column becomes, as text such as ``"3 categories"`` or ``"0 or 1"``."""
        if self.categories is not None:
            return f"{len(self.categories)} categories"
        return {"numbers": "a number", "truth values": "0 or 1"}.get(self.kind, self.kind)


#: Kinds of columns.
NUMBERS_KIND = "numbers"
TRUTH_KIND = "truth values"
WORDS_KIND = "categories"
#: Word of the option ``dates``: days since 1970.
DAYS_SINCE_1970 = "days"
#: Kinds of columns by the results of pandas' ``infer_dtype``.
_KIND_OF_DTYPE = {
    "integer": NUMBERS_KIND,
    "floating": NUMBERS_KIND,
    "mixed-integer-float": NUMBERS_KIND,
    "decimal": NUMBERS_KIND,
    "boolean": TRUTH_KIND,
    "string": WORDS_KIND,
    "empty": NUMBERS_KIND,
}
_NUMBER_OF_TRUTH = {"True": 1.0, "TRUE": 1.0, "true": 1.0, "False": 0.0, "FALSE": 0.0, "false": 0.0}
#: Largest number of different values that may still be categories, or marks of missing values.
MAX_FEW_VALUES = 10
#: Largest number of problems that a message lists.
_MAX_LISTED_PROBLEMS = 30
_LEADING_ZERO = re.compile(r"[-+]?0\d.*")


def with_gaps_as_nan(table: Table, name: str, argument: str, columns: Columns) -> pd.Series:
    """Return a column's values with NaN for missing ones and words stripped of white space."""
    column = table.column(name, argument)
    marks = columns.missing(name, table.typed)
    if is_numeric_dtype(column.dtype) and marks == {""}:
        return column  # no number is an empty text
    if table.typed:
        return _masked_gaps(column, marks, columns.decimal, typed=True)

    def mask_gaps(texts: list[str]) -> pd.Series:
        return _masked_gaps(pd.Series(texts, dtype=object), marks, columns.decimal)

    return as_categories(column, mask_gaps)


def _masked_gaps(
    column: pd.Series, marks: set[str], decimal: str, typed: bool = False
) -> pd.Series:
    texts = as_texts(column)
    is_gap = texts.isna() | texts.isin(list(marks))

    # A mark that is a number marks this number in any notation: -9 also -9.0.
    parsed_marks = parse_numbers(marks)  # NaN for words
    finite_marks = parsed_marks[np.isfinite(parsed_marks)]
    if len(finite_marks) > 0:
        is_gap |= texts.isin(_texts_of_numbers(texts, finite_marks, decimal))

    kind = _KIND_OF_DTYPE.get(infer_dtype(column, skipna=True))
    keeps_types = typed and kind != WORDS_KIND
    values = column.astype(object) if keeps_types else texts
    return values.mask(is_gap)


def _texts_of_numbers(texts: pd.Series, numbers: np.ndarray, decimal: str) -> list[str]:
    """Return the distinct texts that are one of the numbers."""
    distinct_texts = []
    for text in texts.dropna().unique():
        if not _LEADING_ZERO.fullmatch(text):  # 007 is no number
            distinct_texts.append(text)
    is_one_of_numbers = np.isin(parse_numbers(distinct_texts, decimal), numbers)
    return list(compress(distinct_texts, is_one_of_numbers))


def _kind_and_numbers(
    table: Table, values: pd.Series, columns: Columns
) -> tuple[str | None, pd.Series]:
    """Return a column's kind and its values as numbers, with NaN for what is not a number.

    The kind is one of :data:`NUMBERS_KIND`, :data:`TRUTH_KIND` and :data:`WORDS_KIND`, or None if it is ambiguous or
    unusable.
    """
    if table.typed:
        kind = _KIND_OF_DTYPE.get(infer_dtype(values, skipna=True))
        return kind, pd.Series(parse_numbers(values))  # truth values, too

    texts = values.dropna().unique()
    if set(texts) <= _NUMBER_OF_TRUTH.keys():  # also if all are missing: NaN
        kind = TRUTH_KIND if len(texts) else NUMBERS_KIND
        return kind, values.astype(object).map(_NUMBER_OF_TRUTH)

    # Each file may have its own notation of numbers.
    read_file = partial(column_numbers, decimal=columns.decimal, thousands=columns.thousands)
    numbers_by_file = []
    for texts_of_file in by_file(table, values):
        numbers_by_file.append(by_distinct_text(texts_of_file, read_file, dtype=float))
    numbers = pd.concat(numbers_by_file)
    is_number = np.isfinite(numbers[values.notna()])
    have_leading_zeros = any(_LEADING_ZERO.fullmatch(text) for text in texts)
    are_codes = is_number.all() and have_leading_zeros  # such as 007
    if is_number.any() and not are_codes:
        return NUMBERS_KIND, numbers
    return WORDS_KIND, numbers  # nobody reads the numbers of words


def read_columns(
    table: Table, names: Sequence[str], columns: Columns
) -> tuple[list[ColumnCard], dict[str, ColumnError]]:
    """Read the columns ``names`` of all concatenated tables.

    Return the columns, and errors by the names of those that cannot be used, for :func:`raise_problems`.
    """
    cards: list[ColumnCard] = []
    problems: dict[str, ColumnError] = {}
    for name in names:
        try:
            cards.append(_column_card(table, name, columns))
        except ColumnError as error:
            problems[name] = error
    return cards, problems


def raise_problems(problems: Sequence[ColumnError], columns: Columns) -> None:
    """Raise one ConfigurationError that lists ``problems``, if there are any, and options that may help."""
    if not problems:
        return
    lines = list(map(str, problems[:_MAX_LISTED_PROBLEMS]))
    if len(problems) > _MAX_LISTED_PROBLEMS:
        lines.append(f"and {len(problems) - _MAX_LISTED_PROBLEMS} more")
    if columns.agreed is not None and columns.agreed.is_dictionary:
        lines.append("Correct the tables, or let all sites sign another data dictionary.")
        raise ConfigurationError("\n".join(lines))
    lines.append("These options may help (in Python columns={...}):")
    options = json.dumps(columns.with_remedies(problems), ensure_ascii=False)
    lines.append(f"  columns: {options}")
    raise ConfigurationError("\n".join(lines))


def _column_card(table: Table, name: str, columns: Columns) -> ColumnCard:
    kind, values = read_column(table, name, columns)
    if kind == WORDS_KIND:
        is_number = np.isfinite(by_distinct_text(values, parse_numbers, dtype=float))
        words = values.mask(is_number)  # not compared as spellings: 07 and 7 may be two codes
        places_by_word = places_of_words(table, words)
        try:
            check_spelling(places_by_word, f"{table.path}: {name!r}", owners=places_by_word)
        except ConfigurationError as error:
            raise ColumnError(str(error), {"exclude": [name]}) from error
    return ColumnCard(name, kind, values)


def read_column(table: Table, name: str, columns: Columns) -> tuple[str, pd.Series]:
    """Return a column's kind and its values: numbers or words, with NaN for missing ones."""
    dates = columns.dates or {}
    if name in dates:
        return _days_since(table, name, dates[name], columns)
    plain_numbers = _plain_numbers(table, name, columns)
    if plain_numbers is not None:
        return NUMBERS_KIND, plain_numbers
    values = with_gaps_as_nan(table, name, "features", columns)
    values = values.reset_index(drop=True)
    if table.typed:
        values = values.astype(object)
    if name in (columns.categorical or ()):
        return WORDS_KIND, category_names(values)

    kind, numbers = _kind_and_numbers(table, values, columns)
    has_value = values.notna()
    if kind is None:
        raise _mixed_types_error(table, name)
    if kind == WORDS_KIND:
        if not table.typed and are_dates(values[has_value]):
            raise _dates_error(table, name, values, columns)
        _check_not_in_other_notation(table, name, values, columns)
        return kind, category_names(values)

    if numbers[has_value].isna().any():
        _check_not_in_other_notation(table, name, values, columns)
    if not table.typed:
        _check_point_is_unambiguous(table, name, values, columns)
    is_too_large = numbers.abs() > LARGEST_NUMBER
    numbers = numbers.mask(is_too_large)
    is_unreadable = numbers.isna() & has_value
    if is_unreadable.any():
        raise _not_a_number_error(table, name, values[is_unreadable], numbers, columns)
    return kind, numbers


def _plain_numbers(table: Table, name: str, columns: Columns) -> pd.Series | None:
    """Return a text column's numbers, or None unless each text is a number as Python writes it, or a gap.

    Most columns are such. Any other, also one whose texts may mean several things, is read more slowly.
    """
    has_other_notation = columns.decimal != "." or columns.thousands is not None
    if table.typed or has_other_notation or name in (columns.categorical or ()):
        return None
    column = table.column(name, "features").to_numpy(dtype=object)
    text_numbers, distinct_texts = pd.factorize(column)  # each row's text, -1 for NaN
    texts = list(map(str.strip, distinct_texts.tolist()))
    marks = columns.missing(name)
    is_gap = np.array([text in marks for text in texts], dtype=bool)
    texts_of_numbers = [text for text in texts if text not in marks]
    numbers_read = plain_numbers(texts_of_numbers)
    if numbers_read is None or (np.abs(numbers_read) > LARGEST_NUMBER).any():
        return None

    has_points = any("." in text for text in texts_of_numbers)
    if has_points:
        is_text_of_number = np.append(~is_gap, False)
        for numbers_of_file in by_file(table, pd.Series(text_numbers)):
            distinct_numbers = pd.unique(numbers_of_file[is_text_of_number[numbers_of_file]])
            if text_with_ambiguous_point(texts[number] for number in distinct_numbers):
                return None

    numbers_read[np.isin(numbers_read, parse_numbers(marks))] = np.nan
    number_of_text = np.full(len(texts) + 1, np.nan)
    number_of_text[:-1][~is_gap] = numbers_read
    return pd.Series(number_of_text[text_numbers])


def _days_since(
    table: Table, name: str, start_name: str, columns: Columns
) -> tuple[str, pd.Series]:
    start_date: Any
    if start_name == DAYS_SINCE_1970:
        start_date = np.datetime64(0, "D")
        start_title = "1970"
    else:
        start_date = _dates_of(table, start_name, columns)  # one per row
        start_title = start_name
    interval = _dates_of(table, name, columns) - start_date
    days = interval / np.timedelta64(1, "D")
    return f"days since {start_title}", days.reset_index(drop=True)


def _check_point_is_unambiguous(
    table: Table, name: str, values: pd.Series, columns: Columns
) -> None:
    """Raise ColumnError if a point may separate thousands, and no option says what it does."""
    if columns.decimal == "," or columns.thousands is not None:
        return
    for texts in texts_by_file(table, values):
        text = text_with_ambiguous_point(texts)
        if text is None:
            continue
        rows = np.flatnonzero(values == text)
        whole_number = text.replace(".", "")
        remedy = {"decimal": ",", "thousands": "."}
        raise ColumnError(
            f"{table.where(int(rows[0]))}: {text!r} in {name!r} is {whole_number} if the point separates thousands: "
            "all values are whole numbers below 1,000 or have three digits after a point. If it is a decimal point, "
            'say thousands: ","; if not, say as below.',
            remedy,
        )


def _not_a_number_error(
    table: Table, name: str, wrong_values: pd.Series, numbers: pd.Series, columns: Columns
) -> ColumnError:
    """Return an error about values that are not numbers in a column of numbers."""
    words = sorted({str(value) for value in wrong_values})
    has_fractions = (numbers % 1 > 0).any()
    are_continuous = has_fractions or numbers.nunique() > MAX_FEW_VALUES
    remedy: dict[str, Any]  # options for the columns
    if not are_continuous and _has_two_codings(table, wrong_values, numbers):
        row = int(wrong_values.index[0])
        return ColumnError(
            f"{table.where(row)}: {str(wrong_values.iloc[0])!r} in {name!r} is a word, and other tables have numbers: "
            "two codings of one thing? Write the same at all sites.",
            {"exclude": [name]},
        )
    if not are_continuous:
        remedy = {"categorical": [name]}
    elif not isinstance(columns.gaps, list) and len(words) <= MAX_FEW_VALUES:
        # Marks are set by column, or not at all: the words may be further marks of missing values.
        marks_of_columns = columns.gaps or {}
        marks = [*marks_of_columns.get(name, ()), *words]
        remedy = {"gaps": {name: marks}}
    else:
        remedy = {"exclude": [name]}

    row = int(wrong_values.index[0])
    text = str(wrong_values.iloc[0])
    return ColumnError(
        f"{table.where(row)}: {text!r} in {name!r} is not a valid number, but others are: a missing value, or a "
        "category?",
        remedy,
    )


def _has_two_codings(table: Table, words: pd.Series, numbers: pd.Series) -> bool:
    """Return whether each file has words or numbers alone, and at most two of them."""
    is_word = pd.Series(False, index=numbers.index)
    is_word[words.index] = True
    words_and_numbers = numbers.astype(object).where(~is_word, words)
    for values, is_word_of_file in zip(by_file(table, words_and_numbers), by_file(table, is_word)):
        is_word_of_value = is_word_of_file[values.notna()]
        if values.nunique() > 2 or is_word_of_value.nunique() > 1:
            return False
    return True


def _mixed_types_error(table: Table, name: str) -> ColumnError:
    path_by_type = {}
    for part in table.parts:
        for value in part.frame[name].dropna():
            path_by_type[type(value).__name__] = part.path
    descriptions = [f"{type_name} in {path}" for type_name, path in path_by_type.items()]

    remedy: dict[str, Any]
    if path_by_type.keys() <= {"date", "datetime", "Timestamp"}:
        remedy = {"dates": {name: DAYS_SINCE_1970}}
    else:
        remedy = {"exclude": [name]}
    return ColumnError(
        f"{name!r} has {' and '.join(descriptions)}; expected numbers, words or truth values, of the same kind in all "
        "tables.",
        remedy,
    )


def _dates_error(table: Table, name: str, values: pd.Series, columns: Columns) -> ColumnError:
    formats = date_formats(texts_by_file(table, values), columns.date_format or ())
    sentence = f"{table.path}: {name!r} has dates, such as {values.dropna().iloc[0]!r}"
    if formats is None:
        unclear = "whether the day or the month comes first is not clear in all tables"
        to_days = f"Set date_format, such as '%d/%m/%Y', and dates: {{{name}: days}}."
        return ColumnError(f"{sentence}, and {unclear}. {to_days}", {"exclude": [name]})
    remedy: dict[str, Any] = {"dates": {name: DAYS_SINCE_1970}}
    if formats:
        remedy["date_format"] = formats
    return ColumnError(
        f"{sentence}. Convert dates to days since 1970, or since the date in another column.",
        remedy,
    )


def _check_not_in_other_notation(
    table: Table, name: str, values: pd.Series, columns: Columns
) -> None:
    """Raise ColumnError if texts are numbers in another notation, such as with decimal commas."""
    distinct_texts = [sorted({*texts}) for texts in texts_by_file(table, values)]
    numbers_not_read, notations = other_notations(
        distinct_texts, columns.decimal, columns.thousands
    )
    if not numbers_not_read:
        return
    rows = np.flatnonzero(values.isin(numbers_not_read))
    row = int(rows[0])
    where = f"{table.where(row)}: {values[row]!r} in {name!r}"

    # Each notation is a dict of options, such as {"decimal": ",", "thousands": "."}.
    descriptions = []
    for options in notations:
        marks = [f"{option}: {mark!r}" for option, mark in options.items()]
        descriptions.append(", ".join(marks))
    possible_notations = " or ".join(descriptions)
    if len(notations) == 1 and not table.typed:
        titles = {"decimal": "a decimal comma", "thousands": "thousands separators"}
        marks_in_words = " and ".join(titles[option] for option in notations[0])
        raise ColumnError(f"{where} has {marks_in_words} ({possible_notations}).", notations[0])

    if table.typed:
        reason = "stored as text"
    elif notations:
        reason = f"several notations are possible ({possible_notations})"
    else:
        reason = "others are in another notation"
    message = f"{where} is a number, but {reason}. Write all numbers in the same notation, or store them as numbers."
    raise ColumnError(message, {"exclude": [name]})


def _dates_of(table: Table, name: str, columns: Columns) -> pd.Series:
    """Return a column's dates, in UTC if they have a time zone."""
    values = with_gaps_as_nan(table, name, "dates", columns)
    formats = columns.date_format or ()
    if is_datetime64_any_dtype(table.column(name, "dates")):
        # As for text: every day has 24 hours, also where clocks change.
        dates = pd.to_datetime(values, utc=True)
    else:
        texts = as_texts(values)
        dates = parse_dates(texts, formats)
        rows_not_read = np.flatnonzero(dates.isna() & texts.notna()).tolist()
        if rows_not_read:
            row = rows_not_read[0]
            possible_formats = None
            if are_dates(texts.dropna()):
                possible_formats = date_formats(texts_by_file(table, texts), formats)
            remedy: dict[str, Any] = {"exclude": [name]}
            if possible_formats:
                remedy = {"date_format": possible_formats}
            raise ColumnError(
                f"{table.where(row)}: {texts.iloc[row]!r} in {name!r} is not a date, or an ambiguous one, in the "
                f"formats {listed(['YYYY-MM-DD', *formats])}: set date_format.",
                remedy,
            )
    return dates.dt.tz_localize(None).astype("datetime64[us]")
