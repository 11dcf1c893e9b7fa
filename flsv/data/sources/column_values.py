"""Functions that read a column's values: numbers, truth values, words, or dates."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import compress
from typing import Any

import numpy as np
import pandas as pd
from pandas.api.types import (
    infer_dtype,
    is_datetime64_any_dtype,
    is_numeric_dtype,
    union_categoricals,
)

from flsv.data.groups import check_spelling
from flsv.data.sources.agreed import (
    DAYS_KIND,
    LARGEST_NUMBER,
    NUMBERS_KIND,
    TRUTH_KIND,
    WORDS_KIND,
)
from flsv.data.sources.columns import DAYS_SINCE_1970, ColumnCard, Columns
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
    LEADING_ZERO,
    NUMBER_IN_ANY_NOTATION,
    TWO_WRITINGS,
    TextFormat,
    are_dates,
    parse_dates,
    parse_numbers,
    text_with_ambiguous_point,
)
from flsv.data.sources.table import Table
from flsv.utilities.errors import ColumnError, ConfigurationError, listed

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


def by_format(
    table: Table, values: pd.Series, columns: Columns
) -> list[tuple[TextFormat, pd.Series]]:
    """Return how each file is written, and its values of a column."""
    formats = [columns.format_of(part.client) for part in table.parts]
    return list(zip(formats, by_file(table, values)))


def with_gaps_as_nan(table: Table, name: str, argument: str, columns: Columns) -> pd.Series:
    """Return a column's values with NaN for missing ones and words stripped of white space."""
    column = table.column(name, argument)
    marks = columns.missing(name, table.typed)
    if is_numeric_dtype(column.dtype) and marks == {""}:
        return column  # no number is an empty text
    if table.typed:
        return _masked_gaps(column, marks, typed=True)

    masked_by_file = []
    for text_format, values in by_format(table, column, columns):
        mask_gaps = partial(_masked_gaps, marks=marks, decimal=text_format.decimal)
        masked_by_file.append(as_categories(values, mask_gaps))
    return pd.Series(union_categoricals(masked_by_file), index=column.index)


def _masked_gaps(
    column: pd.Series, marks: set[str], decimal: str = ".", typed: bool = False
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
        if not LEADING_ZERO.match(text):  # 007 is no number
            distinct_texts.append(text)
    is_one_of_numbers = np.isin(parse_numbers(distinct_texts, decimal), numbers)
    return list(compress(distinct_texts, is_one_of_numbers))


def _kind_and_numbers(
    table: Table, values: pd.Series, columns: Columns
) -> tuple[str | None, pd.Series]:
    """Return a column's kind, or None if it is ambiguous, and its numbers, NaN for what is not a number."""
    if table.typed:
        kind = _KIND_OF_DTYPE.get(infer_dtype(values, skipna=True))
        return kind, pd.Series(parse_numbers(values))  # truth values, too

    texts = values.dropna().unique()
    if set(texts) <= _NUMBER_OF_TRUTH.keys():  # also if all are missing: NaN
        kind = TRUTH_KIND if len(texts) else NUMBERS_KIND
        return kind, values.astype(object).map(_NUMBER_OF_TRUTH)

    # Each file may have its own notation of numbers.
    numbers_by_file = []
    for text_format, texts_of_file in by_format(table, values, columns):
        read_file = partial(
            parse_numbers, decimal=text_format.decimal, thousands=text_format.thousands
        )
        numbers_by_file.append(by_distinct_text(texts_of_file, read_file, dtype=float))
    numbers = pd.concat(numbers_by_file)
    is_number = np.isfinite(numbers[values.notna()])
    have_leading_zeros = any(LEADING_ZERO.match(text) for text in texts)
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


def _column_card(table: Table, name: str, columns: Columns) -> ColumnCard:
    kind, values = read_column(table, name, columns)
    if kind == WORDS_KIND:
        distinct_words = values.dropna().unique().tolist()
        # 07 and 7 may be two codes, so that numbers may be spelt alike.
        is_number = np.isfinite(parse_numbers(distinct_words))
        words = compress(distinct_words, ~is_number)

        def places() -> Any:
            return places_of_words(table, values)

        try:
            check_spelling(words, f"{table.path}: {name!r}", owners=places)
        except ConfigurationError as error:
            raise ColumnError(str(error), {"exclude": [name]}) from error
    return ColumnCard(name, kind, values)


def read_column(table: Table, name: str, columns: Columns) -> tuple[str, pd.Series]:
    """Return a column's kind and its values: numbers or words, with NaN for missing ones."""
    dates = columns.dates or {}
    if name in dates:
        return _days_since(table, name, dates[name], columns)
    plain_numbers = table.numbers(name)
    if plain_numbers is not None and name not in (columns.categorical or ()):
        return NUMBERS_KIND, plain_numbers.reset_index(drop=True)

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
            raise _dates_error(table, name, values)
        _check_not_in_other_notation(table, name, values, numbers)
        return kind, category_names(values)

    _check_not_in_other_notation(table, name, values, numbers)
    if not table.typed:
        _check_point_is_unambiguous(table, name, values, columns)
    is_too_large = numbers.abs() > LARGEST_NUMBER
    numbers = numbers.mask(is_too_large)
    is_unreadable = numbers.isna() & has_value
    if is_unreadable.any():
        raise _not_a_number_error(table, name, values[is_unreadable])
    return kind, numbers


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
    return f"{DAYS_KIND}{start_title}", days.reset_index(drop=True)


def _check_point_is_unambiguous(
    table: Table, name: str, values: pd.Series, columns: Columns
) -> None:
    """Raise ColumnError if a point may separate thousands."""
    formats_and_values = by_format(table, values, columns)
    for (text_format, _), texts in zip(formats_and_values, texts_by_file(table, values)):
        text = text_with_ambiguous_point(texts)
        if text is None or text_format.states_notation:
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


def _not_a_number_error(table: Table, name: str, wrong_values: pd.Series) -> ColumnError:
    """Return an error about values that are not numbers in a column of numbers."""
    row = int(wrong_values.index[0])
    value = str(wrong_values.iloc[0])
    gaps = {name: [value]}
    return ColumnError(
        f"{table.where(row)}: {value!r} in {name!r} is not a valid number, but others are: a missing value (gaps: "
        f"{gaps}), {TWO_WRITINGS}",
        {"exclude": [name]},
    )


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


def _dates_error(table: Table, name: str, values: pd.Series) -> ColumnError:
    row = values.first_valid_index()
    return ColumnError(
        f"{table.where(row)}: {name!r} has dates, such as {values[row]!r}. Convert dates to days since 1970, or since "
        "the date in another column. Dates other than 2024-03-31 need a date_format, such as '%d.%m.%Y'.",
        {"dates": {name: DAYS_SINCE_1970}},
    )


def _check_not_in_other_notation(
    table: Table, name: str, values: pd.Series, numbers: pd.Series
) -> None:
    """Raise ColumnError if texts are numbers in another notation, such as with decimal commas."""
    unread_values = values[numbers.isna()].dropna().unique()
    texts = {value for value in unread_values if isinstance(value, str)}
    numbers_not_read = set(filter(NUMBER_IN_ANY_NOTATION.fullmatch, texts))
    words = texts - numbers_not_read
    are_mostly_words = len(words) > values.nunique() / 2
    if not numbers_not_read or are_mostly_words:
        return

    rows = np.flatnonzero(values.isin(numbers_not_read))
    row = int(rows[0])
    problem = (
        "in another notation. Set decimal and thousands, or those of one client's file (read)."
    )
    if table.typed:
        problem = "stored as text. Store all numbers as numbers."
    raise ColumnError(
        f"{table.where(row)}: {values[row]!r} in {name!r} is a number {problem}",
        {"exclude": [name]},
    )


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
            raise ColumnError(
                f"{table.where(row)}: {texts.iloc[row]!r} in {name!r} is not a date, or an ambiguous one, in the "
                f"formats {listed(['YYYY-MM-DD', *formats])}: set date_format.",
                {"exclude": [name]},
            )
    return dates.dt.tz_localize(None).astype("datetime64[us]")
