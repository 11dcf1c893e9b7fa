"""Drafts of a data dictionary from a table, which ask what its cells do not say.

A column that is not clear is drafted as an excluded one, whose reason is a question.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
from pandas.api.types import (
    infer_dtype,
    is_bool_dtype,
    is_datetime64_any_dtype,
    is_integer_dtype,
    is_numeric_dtype,
)

from flsv.data.groups import check_spelling
from flsv.data.labels import in_order
from flsv.data.tables.cells import Cells, numbers_of
from flsv.data.tables.dictionary import (
    CATEGORIES,
    DAYS,
    NUMBER_BY_TRUTH,
    NUMBERS,
    REST,
    TRUTHS,
    WHOLE_NUMBERS,
    Column,
    Dictionary,
)
from flsv.utilities.errors import ConfigurationError

#: Smallest number of rows of a category that a site's draft names.
MIN_ROWS = 5
#: Largest number of categories of a column whose kind nobody has named.
MAX_CATEGORIES = 50
#: Smallest number of values that are doubted.
MIN_COMPARED = 20
#: Whole numbers or words look like numbers of cases from this share of different values on.
UNIQUE_SHARE = 0.99
MIN_VALUES_OF_IDENTIFIERS = 50
#: Some values lie apart from so many widths of all others on.
MIN_WIDTHS = 1.0
#: Digits of drafted means and scales, in standard deviations.
NUM_DIGITS = 7
_DATE = re.compile(r"\d{4}-\d\d?-\d\d?([T ].*)?|\d{1,2}([./-])\d{1,2}\2\d{4}( .*)?")
_LEADING_ZERO = re.compile(r"\n *[-+]?0\d")
_GROUPED_NUMBER = re.compile(r"[-+]?[1-9]\d{0,2}([., '\u00a0\u202f])\d{3}")
_SHORT_NUMBER = re.compile(r"[-+]?\d{1,3}")
_ANY_NUMBER = re.compile(
    r"[-+]?(\d+|[1-9]\d{0,2}([., '\u00a0\u202f]\d{3})+)([.,]\d+)?([eE][-+]?\d+)?"
)


class Question(ConfigurationError):
    """Question that a table's cells do not answer: what a column means, or how it is written."""


@dataclass(frozen=True)
class ColumnCard:
    """Record of a table's column: the features that it became, and which training rows have no value, bool ``[N]``."""

    name: str
    became: str
    is_missing: np.ndarray


@dataclass(frozen=True)
class TableDoubt:
    """Doubt about a column of a site."""

    site: str
    column: str
    text: str


def draft(
    cells: Cells,
    dictionary: Dictionary,
    rows_by_site: Mapping[str, np.ndarray] | None = None,
    min_rows: int = 1,
) -> tuple[dict[str, Dictionary], list[TableDoubt]]:
    """Complete a dictionary for each site whose rows a table has, and doubt what is odd.

    Args:
        cells: the table, whose rows have a target.
        dictionary: what is known already, at least the target.
        rows_by_site: positions of each site's rows. None: all are of the site that has the table's name.
        min_rows: smallest number of rows of a category that the draft names.

    Returns:
        Each site's dictionary, and doubts.
    """
    for name in (dictionary.target, *dictionary.columns):
        if name != REST:
            cells.check_has(name, "the data dictionary")
    if rows_by_site is None:
        rows_by_site = {cells.name: np.arange(len(cells))}

    excluded = dict(dictionary.excluded)
    columns_by_site: dict[str, dict[str, Column]] = {}
    for site in rows_by_site:
        columns_by_site[site] = {}
    doubts = []
    for name in _column_names(cells, dictionary):
        try:
            column, values = _read_column(cells, name, dictionary.column(name))
        except Question as question:
            excluded[name] = f"? {question}"
            continue

        for site, rows in rows_by_site.items():
            values_of_site = values
            if len(rows) != len(values):
                values_of_site = values.iloc[rows]
            site_column = drafted_column(column, values_of_site, min_rows)
            columns_by_site[site][name] = site_column
            for text in oddities(column, values_of_site.dropna()):
                doubt = TableDoubt(site=site, column=name, text=text)
                doubts.append(doubt)

    drafts = {}
    for site, rows in rows_by_site.items():
        site_dictionary = replace(
            dictionary,
            columns=columns_by_site[site],
            excluded=excluded,
        )
        drafts[site] = with_target(site_dictionary, cells.take(rows))
    return drafts, doubts


def _column_names(cells: Cells, dictionary: Dictionary) -> list[str]:
    """Return the columns to draft: those that the dictionary names, and all others unless it excludes them."""
    excluded_names = {dictionary.target, dictionary.patient, *dictionary.excluded}
    names = []
    for name in cells.frame:
        is_left_out = REST in excluded_names and name not in dictionary.columns
        if name not in excluded_names and not is_left_out:
            names.append(name)
    return names


def with_target(dictionary: Dictionary, cells: Cells) -> Dictionary:
    """Draft the classes, or mean and scale of numbers to predict."""
    if dictionary.task == "regression":
        numbers = pd.Series(cells.numbers(dictionary.target))
        target = drafted_column(Column(NUMBERS), numbers, min_rows=1)
        return with_target_column(dictionary, target)

    words = cells.words(dictionary.target, "target")
    classes = dictionary.classes or in_order(list(words.cat.categories))
    counts = words.value_counts()
    class_counts = [int(counts.get(name, 0)) for name in classes]
    return replace(
        dictionary,
        classes=tuple(classes),
        class_counts=tuple(class_counts),
    )


def with_target_column(dictionary: Dictionary, target: Column) -> Dictionary:
    """Return a dictionary with the mean and scale of numbers to predict, if these are standardized."""
    dictionary = replace(dictionary, class_counts=(target.count,))
    if not dictionary.standardize_target:
        return dictionary
    if not target.scale:
        raise ConfigurationError(
            f"all training rows have the same {dictionary.target!r}, which cannot be standardized."
        )
    return replace(dictionary, target_mean=target.mean or 0.0, target_scale=target.scale)


def _read_column(
    cells: Cells,
    name: str,
    column: Column,
) -> tuple[Column, pd.Series]:
    """Return a column with its kind, and the table's values in it."""
    kind = column.kind or kind_of(cells, name, column)
    # No cell is a misfit before it is known what fits.
    unlimited_column = replace(
        column,
        kind=kind,
        low=None,
        high=None,
        other_words=True,
        gaps=column.gaps or True,
    )
    values, is_misfit = unlimited_column.values(cells, name)
    if is_misfit.any():
        row = int(np.argmax(is_misfit))
        cell = str(cells.texts(name).iloc[row])
        raise Question(
            f"{cells.where([row])}: {cell!r} is none of {kind}, as other cells are. A missing value (gaps), another "
            "notation (read), a unit, or categories (kind)?"
        )

    if kind == CATEGORIES:
        num_words = len(values.cat.categories)
        if num_words > MAX_CATEGORIES and not column.kind:
            raise Question(
                f"{num_words} different words in {cells.name}. Numbers of cases and texts are no features; kind: "
                "categories makes as many of them"
            )
        check_spelling_of_words(values.cat.categories, cells.name)
    return replace(column, kind=kind), values


def drafted_column(column: Column, values: pd.Series, min_rows: int) -> Column:
    """Return a complete column by its values in a site's rows, NaN where one is missing."""
    known_values = values.dropna()
    num_missing = len(values) - len(known_values)
    gaps = column.gaps
    if num_missing == 0 and gaps is True:
        gaps = False
    column = replace(
        column,
        gaps=gaps,
        count=len(known_values),
        missing=num_missing,
    )

    if column.is_complete and column.kind == CATEGORIES:
        return column
    if column.kind == CATEGORIES:
        counts = known_values.cat.remove_unused_categories().value_counts()
        frequent_words = counts.index[counts >= min_rows]
        has_rare_words = len(frequent_words) < len(counts)
        return replace(
            column,
            categories=tuple(sorted(frequent_words)),
            other_words=column.other_words or has_rare_words,
        )
    if known_values.empty:
        return replace(
            column,
            mean=column.mean or 0.0,
            scale=column.scale or 1.0,
        )

    numbers = known_values.to_numpy(dtype=float)
    deviation = float(numbers.std())
    low, high = wide_range(numbers)
    if column.low is not None:
        low = column.low
    if column.high is not None:
        high = column.high
    if column.mean is None or column.scale is None:
        column = replace(
            column,
            mean=rounded(float(numbers.mean()), deviation),
            scale=rounded(deviation, deviation),
        )
    return replace(column, low=low, high=high)


def check_spelling_of_words(
    words: Iterable[str],
    where: str,
    owners: Callable[[], Mapping[str, Sequence[str]]] = dict,
) -> None:
    """Raise Question if two words, which are no numbers, are spellings of one."""
    texts = []
    for word in words:
        if not _ANY_NUMBER.fullmatch(word):
            texts.append(word)
    try:
        check_spelling(texts, where, owners)
    except ConfigurationError as error:
        raise Question(str(error)) from error


def kind_of(cells: Cells, name: str, column: Column) -> str:
    """Return a column's kind, or raise Question."""
    if column.categories is not None:
        return CATEGORIES
    typed_cells = cells.frame[name]
    if isinstance(typed_cells.dtype, pd.CategoricalDtype):
        return CATEGORIES
    if is_bool_dtype(typed_cells):
        return TRUTHS
    if cells.file is None:
        type_of_cells = infer_dtype(typed_cells, skipna=True)
        if type_of_cells in ("mixed", "mixed-integer"):
            raise Question(f"values of several types in {cells.name}. Give them one")
    if is_numeric_dtype(typed_cells):
        return _kind_of_numbers(cells, name, typed_cells.dropna())
    return _kind_of_texts(cells, name, column)


def _kind_of_texts(cells: Cells, name: str, column: Column) -> str:
    """Return the kind of a column with texts or dates, or raise Question."""
    words = cells.words(name)
    gap_marks = column.gap_marks(cells.file is not None)
    texts = [text for text in words.cat.categories if text not in gap_marks]
    if not texts:
        return NUMBERS
    if set(texts) <= NUMBER_BY_TRUTH.keys():
        return TRUTHS

    has_dates = is_datetime64_any_dtype(cells.frame[name])
    if has_dates or all(map(_DATE.fullmatch, texts)):
        raise Question(
            f"dates, such as {texts[0]!r} in {cells.name}. Days since what? kind: {DAYS}1970, or {DAYS}another column"
        )

    numbers = numbers_of(pd.Series(texts, dtype=object), cells.file_format)
    is_number = np.isfinite(numbers)
    _check_notation(cells, words, texts, is_number)
    if not is_number.any():
        return CATEGORIES
    return _kind_of_numbers(cells, name, pd.Series(numbers[is_number]))


def _check_notation(
    cells: Cells,
    words: pd.Series,
    texts: Sequence[str],
    is_number: np.ndarray,
) -> None:
    """Raise Question if a text is a number in another notation than the file's."""
    for text, is_in_notation in zip(texts, is_number):
        if not is_in_notation and _ANY_NUMBER.fullmatch(text):
            row = int(np.argmax(words == text))
            raise Question(
                f"{cells.where([row])}: {text!r} is a number in another notation (read: decimal, thousands), or not "
                "a number (kind: categories)?"
            )


def _kind_of_numbers(cells: Cells, name: str, numbers: pd.Series) -> str:
    if cells.file is not None and cells.file.may_have_leading_zeros:
        texts = cells.texts(name).tolist()
        if _LEADING_ZERO.search("\n".join(["", *texts])):
            return CATEGORIES
    if cells.file is not None and cells.file.may_have_groups:
        _check_point(cells, name)
    return WHOLE_NUMBERS if (numbers % 1 == 0).all() else NUMBERS


def _check_point(cells: Cells, name: str) -> None:
    """Raise Question if all numbers are below 1,000 or have three digits after a point, and there are both."""
    if cells.file_format.thousands is not None or is_integer_dtype(cells.frame[name]):
        return
    texts = cells.texts(name).tolist()
    distinct_texts = set(texts)
    grouped = set(filter(_GROUPED_NUMBER.fullmatch, distinct_texts))
    short = set(filter(_SHORT_NUMBER.fullmatch, distinct_texts))
    remaining_texts = distinct_texts - grouped - short
    has_other_numbers = any(text[-1:].isdigit() for text in remaining_texts)
    if grouped and short and not has_other_numbers:
        text = max(grouped)
        row = texts.index(text)
        raise Question(
            f"{cells.where([row])}: does the point of {text!r} separate thousands? It stands beside {max(short)!r}. "
            'Say read: thousands: ".", or kind: numbers'
        )


def rounded(number: float, deviation: float) -> float:
    """Round to digits of a standard deviation, so that a file has few of them."""
    size = deviation or abs(number) or 1.0
    return round(number, NUM_DIGITS - math.floor(math.log10(size)))


def wide_range(numbers: np.ndarray) -> tuple[float, float]:
    """Return rounded bounds far beyond most numbers, which are no single row's, or the codes of a yes and no.

    Example:
        >>> wide_range(np.arange(20, 91))
        (0.0, 160.0)
    """
    smallest = float(numbers.min())
    largest = float(numbers.max())
    num_smallest = int((numbers == smallest).sum())
    num_largest = int((numbers == largest).sum())
    have_two_codes = num_smallest + num_largest == len(numbers) and smallest < largest
    if have_two_codes and min(num_smallest, num_largest) >= MIN_ROWS:
        return smallest, largest

    lower, upper = np.quantile(numbers, (0.01, 0.99))
    width = upper - lower
    magnitude = width or abs(upper) or 1.0
    step = 10.0 ** math.floor(math.log10(magnitude))
    exact_low = min(lower - width, smallest)
    exact_high = max(upper + width, largest)
    low = step * (math.ceil(exact_low / step) - 1)
    high = step * (math.floor(exact_high / step) + 1)
    if smallest >= 0:
        low = max(low, 0.0)
    return float(f"{low:.12g}"), float(f"{high:.12g}")


def oddities(column: Column, known_values: pd.Series) -> Iterator[str]:
    """Yield what is odd in the values of one table."""
    num_values = len(known_values)
    has_fractions = column.kind == NUMBERS or column.kind.startswith(DAYS)
    may_be_identifiers = not has_fractions and num_values >= MIN_VALUES_OF_IDENTIFIERS
    if may_be_identifiers and known_values.nunique() > UNIQUE_SHARE * num_values:
        yield "nearly all values are different, as of a number of the case: exclude it"
    if not column.has_numbers or num_values < MIN_COMPARED:
        return
    numbers = np.sort(known_values.to_numpy(dtype=float))
    num_apart = _num_values_apart(numbers)
    if not num_apart and numbers[0] > 0:
        num_apart = _num_values_apart(np.log(numbers))
    if num_apart:
        yield f"{num_apart} of {num_values} values lie apart: codes of missing ones, or another unit?"


def _num_values_apart(numbers: np.ndarray) -> int:
    """Count at least five of some ascending numbers that lie farther from all others than these do from each other."""
    distances = np.diff(numbers)
    split = int(np.argmax(distances)) + 1
    lower_part = numbers[:split]
    upper_part = numbers[split:]
    smaller_part, larger_part = sorted([lower_part, upper_part], key=len)
    width = larger_part[-1] - larger_part[0]
    is_apart = distances[split - 1] > MIN_WIDTHS * width > 0
    if is_apart and len(smaller_part) >= MIN_ROWS:
        return len(smaller_part)
    return 0
