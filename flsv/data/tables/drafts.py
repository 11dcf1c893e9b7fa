"""Drafts of a data dictionary from a table, which ask what its cells do not say.

A column that is not clear is drafted as an excluded one, whose reason is a question.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
from pandas.api.types import (
    infer_dtype,
    is_bool_dtype,
    is_datetime64_any_dtype,
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
from flsv.utilities.errors import ConfigurationError, listed

#: Smallest number of rows of a category that a site's draft names.
MIN_ROWS = 5
#: Largest number of categories of a column whose kind nobody has named.
MAX_CATEGORIES = 50
#: Smallest number of values that are compared.
MIN_COMPARED = 20
#: Smallest number of values among which any value may lie apart, and not only a code.
MIN_VALUES = 50
#: Largest number of units that texts with numbers have.
MAX_UNITS = 3
#: Smallest number of different values of a column whose name is that of an identifier, and of running numbers.
MIN_IDENTIFIERS = 20
MIN_RUNNING_NUMBERS = 100
#: Digits of drafted means and scales, in standard deviations.
NUM_DIGITS = 7
#: Largest number by which a site's draft divides a deviation to round means and scales.
MAX_ROUNDING = 1000
#: Codes of missing values.
_NINES = re.compile(r"-?9+")
#: Names of columns that say whose a row is.
_IDENTIFIER = re.compile(
    r"(?i)(.*[\W_])?(id|pid|mrn|uuid|patient|subject|person|case|record|student|customer|user)s?"
    r"([\W_]?(id|no|nr|number|code|key))?"
)
_WITH_UNIT = re.compile(r"[-+]?\d[\d.,]*(\s*)([%‰°]\S*|[^\W\d_]\S*)")
_DATE = re.compile(r"\d{4}-\d\d?-\d\d?([T ].*)?|\d{1,2}([./-])\d{1,2}\2\d{4}( .*)?")
_LEADING_ZERO = re.compile(r"[-+]?0\d.*")
_DIALED_NUMBER = re.compile(r"\+\d+")
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
    leaves_site: bool = False,
) -> dict[str, Dictionary]:
    """Complete a dictionary for each site whose rows a table has.

    Args:
        cells: the table, whose rows have a target.
        dictionary: what is known already, at least the target.
        rows_by_site: positions of each site's rows. None: all are of the site that has the table's name.
        leaves_site: whether others read the draft, so that it hides counts below five, and rounds.

    Returns:
        Each site's dictionary.
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
            site_column = drafted_column(column, values_of_site, leaves_site)
            columns_by_site[site][name] = site_column

    drafts = {}
    for site, rows in rows_by_site.items():
        site_dictionary = replace(
            dictionary,
            columns=columns_by_site[site],
            excluded=excluded,
        )
        drafts[site] = with_target(site_dictionary, cells.take(rows), leaves_site)
    return drafts


def _column_names(cells: Cells, dictionary: Dictionary) -> list[str]:
    """Return the columns to draft: those that the dictionary names, and all others unless it excludes them."""
    excluded_names = {dictionary.target, dictionary.patient, *dictionary.excluded}
    names = []
    for name in cells.frame:
        is_left_out = REST in excluded_names and name not in dictionary.columns
        if name not in excluded_names and not is_left_out:
            names.append(name)
    return names


def with_target(dictionary: Dictionary, cells: Cells, leaves_site: bool = False) -> Dictionary:
    """Draft the classes, or mean and scale of numbers to predict."""
    if dictionary.task == "regression":
        numbers = pd.Series(cells.numbers(dictionary.target))
        target = drafted_column(Column(NUMBERS), numbers, leaves_site)
        return with_target_column(dictionary, target)

    words = cells.words(dictionary.target, "target")
    classes = dictionary.classes or in_order(list(words.cat.categories))
    counts = words.value_counts()
    class_counts = [int(counts.get(name, 0)) for name in classes]
    if leaves_site:
        class_counts = [count if count >= MIN_ROWS else 0 for count in class_counts]
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
        cell = str(cells.frame[name].iloc[row])
        raise Question(
            f"{cells.where([row])}: {cell!r} is none of {kind}, as other cells are. A missing value (gaps), another "
            "notation (read), a number with its unit (unit), or categories (kind)?"
        )

    if not column.kind:
        _check_names_no_rows(cells, name, kind, values)
    if kind == CATEGORIES:
        check_spelling_of_words(values.cat.categories, cells.title)
    elif kind != TRUTHS:
        _check_none_lies_apart(cells, name, column, values)
    return replace(column, kind=kind), values


def _check_names_no_rows(cells: Cells, name: str, kind: str, values: pd.Series) -> None:
    """Raise Question if values name rows, persons or cases, or are too many words."""
    if kind not in (WHOLE_NUMBERS, CATEGORIES):
        return
    num_values = values.nunique()
    is_named = num_values >= MIN_IDENTIFIERS and _IDENTIFIER.fullmatch(name)
    are_running_numbers = False
    if kind == WHOLE_NUMBERS and num_values == len(values) >= MIN_RUNNING_NUMBERS:
        are_running_numbers = values.max() - values.min() < 2 * num_values
    if is_named or are_running_numbers:
        raise Question(
            f"{num_values} different values in {cells.title}, as of a number of the case. Leave it out, or say its kind"
        )
    if kind == CATEGORIES and num_values > MAX_CATEGORIES:
        raise Question(
            f"{num_values} different words in {cells.title}. Numbers of cases and texts are no features; kind: "
            "categories makes as many of them"
        )


def _check_none_lies_apart(cells: Cells, name: str, column: Column, values: pd.Series) -> None:
    """Raise Question if values lie apart on a side on which nobody has said what fits."""
    values_apart = apart(values.dropna().to_numpy(dtype=float))
    if not len(values_apart):
        return
    is_below = values_apart[0] <= values.min()
    bound = column.low if is_below else column.high
    if bound is not None:
        return
    row = int(np.argmax(values == values_apart[0]))
    cell = str(cells.frame[name].iloc[row])
    raise Question(
        f"{cells.where([row])}: {cell!r} lies farther from all other values than these from each other. A missing "
        f"value (gaps), another unit, or a value like others ({'low' if is_below else 'high'})?"
    )


def apart(numbers: np.ndarray) -> np.ndarray:
    """Return the numbers that lie farther from all others than these from each other, ascending, or none.

    Their gap to the others is wider than the range of the others. That is enough for codes (9, 99, -999, ...), and for
    negative numbers beside others that are not. Any other number lies apart among 50 if the gap is wider also in
    ``log(1 + x / s)``, with the others' median distance ``s`` from their median, so that skewed numbers, as of money,
    do not, or beside other negative numbers if the gap is three times as wide. Zeros never lie apart, nor does what is
    beside fewer than 20 different numbers, but for a code.

    Example:
        >>> apart(np.array([*range(60), 99, -999.0]))
        array([-999.])
        >>> apart(np.geomspace(1, 1e6, 60))
        array([], dtype=float64)
    """
    none = np.array([])
    if len(numbers) < MIN_COMPARED:
        return none
    numbers = np.sort(numbers)
    negative_numbers = numbers[numbers < 0]
    if _is_code(negative_numbers):
        return negative_numbers

    logarithms = _logarithms(numbers, _typical_distance(numbers))
    split = int(np.argmax(np.diff(logarithms))) + 1  # behind the widest gap
    few_numbers, other_numbers = sorted([numbers[:split], numbers[split:]], key=len)
    gap = numbers[split] - numbers[split - 1]
    range_of_others = np.ptp(other_numbers)
    if not gap > range_of_others > 0 or not few_numbers.any():
        return none
    if _is_code(few_numbers):
        return few_numbers
    if len(np.unique(other_numbers)) < MIN_COMPARED:  # such as doses of 5, 10 and 20
        return none
    if few_numbers[-1] < 0 <= other_numbers[0]:
        return few_numbers
    if len(numbers) < MIN_VALUES:
        return none

    if numbers[0] < 0:
        is_apart = gap > 3 * range_of_others
    else:
        unit = _typical_distance(other_numbers)
        gap_of_logarithms = np.diff(_logarithms(numbers, unit)).max()
        is_apart = gap_of_logarithms > np.ptp(_logarithms(other_numbers, unit))
    return few_numbers if is_apart else none


def _logarithms(numbers: np.ndarray, unit: float) -> np.ndarray:
    """Return ascending numbers on a logarithmic scale from zero on, if none is negative."""
    if numbers[0] < 0 or not unit:
        return numbers
    return np.log1p(numbers / unit)


def _is_code(numbers: np.ndarray) -> bool:
    """Return whether numbers are one code of missing values."""
    distinct_numbers = set(numbers.tolist())
    return len(distinct_numbers) == 1 and bool(_NINES.fullmatch(f"{distinct_numbers.pop():.15g}"))


def _typical_distance(numbers: np.ndarray) -> float:
    """Return the median distance from the median, or the mean one if most numbers are equal."""
    distances = np.abs(numbers - np.median(numbers))
    return float(np.median(distances) or distances.mean())


def drafted_column(column: Column, values: pd.Series, leaves_site: bool = False) -> Column:
    """Return a complete column by its values in a site's rows, NaN where one is missing."""
    known_values = values.dropna()
    num_missing = len(values) - len(known_values)
    if num_missing == 0 and column.gaps is True:
        column = replace(column, gaps=False)
    if leaves_site and len(known_values) < MIN_ROWS:
        known_values = known_values.iloc[:0]
    if leaves_site and num_missing < MIN_ROWS:
        num_missing = 0
    count = len(values) - num_missing if len(known_values) else 0
    column = replace(column, count=count, missing=len(values) - count)

    if column.is_complete and column.kind == CATEGORIES:
        return column
    if column.kind == CATEGORIES:
        counts = known_values.cat.remove_unused_categories().value_counts()
        min_rows = MIN_ROWS if leaves_site else 1
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
    low, high = wide_range(numbers)
    if column.low is not None:
        low = column.low
    if column.high is not None:
        high = column.high
    if column.mean is None or column.scale is None:
        mean, scale = _told_moments(numbers) if leaves_site else _moments(numbers)
        column = replace(column, mean=mean, scale=scale)
    return replace(column, low=low, high=high)


def _moments(numbers: np.ndarray) -> tuple[float, float]:
    """Return rounded mean and standard deviation."""
    deviation = float(numbers.std())
    return rounded(float(numbers.mean()), deviation), rounded(deviation, deviation)


def _told_moments(numbers: np.ndarray) -> tuple[float, float]:
    """Return mean and standard deviation so far rounded that one row more or less does not show.

    That is a deviation over the number of rows, up to a thousandth. Fewer than five rows that differ from all others
    do not count.
    """
    distinct_numbers, counts = np.unique(numbers, return_counts=True)
    if len(numbers) - counts.max() < MIN_ROWS:
        return float(f"{distinct_numbers[counts.argmax()]:.3g}"), 0.0
    deviation = float(numbers.std())
    step = float(f"{deviation / min(len(numbers), MAX_ROUNDING):.0e}")
    moments = []
    for moment in (float(numbers.mean()), deviation):
        rounded_moment = round(moment / step) * step
        moments.append(float(f"{rounded_moment:.12g}"))
    mean, scale = moments
    return mean, scale


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
    if not cells.is_text_file:
        type_of_cells = infer_dtype(typed_cells, skipna=True)
        if type_of_cells in ("mixed", "mixed-integer"):
            raise Question(f"values of several types in {cells.title}. Give them one")
    if not is_numeric_dtype(typed_cells):
        return _kind_of_texts(cells, name, column)
    return _kind_of_numbers(cells, name, typed_cells.dropna())


def _kind_of_texts(cells: Cells, name: str, column: Column) -> str:
    """Return the kind of a column with texts or dates, or raise Question."""
    words = cells.words(name)
    gap_marks = column.gap_marks(cells.is_text_file)
    texts = [text for text in words.cat.categories if text not in gap_marks]
    if not texts:
        return NUMBERS
    if set(texts) <= NUMBER_BY_TRUTH.keys():
        return TRUTHS

    has_dates = is_datetime64_any_dtype(cells.frame[name])
    if has_dates or all(map(_DATE.fullmatch, texts)):
        raise Question(
            f"dates, such as {texts[0]!r} in {cells.title}. Days since what? kind: {DAYS}1970, or {DAYS}another column"
        )

    numbers = numbers_of(pd.Series(texts, dtype=object), cells.file_format, column.unit)
    is_number = np.isfinite(numbers)
    _check_notation(cells, words, texts, is_number)
    if not is_number.any():
        _check_units(texts)
        return CATEGORIES
    if _are_codes(texts):
        return CATEGORIES
    return _kind_of_numbers(cells, name, pd.Series(numbers[is_number]))


def _are_codes(texts: Collection[str]) -> bool:
    """Return whether numbers name something: one begins with a zero, or each with a plus, as 01067 and +4930."""
    have_zeros = any(map(_LEADING_ZERO.fullmatch, texts))
    return have_zeros or (bool(texts) and all(map(_DIALED_NUMBER.fullmatch, texts)))


def _check_units(texts: Sequence[str]) -> None:
    """Raise Question if all texts are numbers with units."""
    matches = [match for text in texts if (match := _WITH_UNIT.fullmatch(text))]
    if len(matches) < len(texts):
        return
    units = sorted({match[2] for match in matches})
    if len(units) == 1:
        raise Question(
            f"{texts[0]!r} is a number with a unit. Say unit: {units[0]!r}, or kind: categories"
        )
    if len(units) <= MAX_UNITS and all(match[1] for match in matches):
        raise Question(
            f"{texts[0]!r} is a number with a unit, and {listed(units, show=repr)} are there. Write one unit in the "
            "table, or say kind: categories"
        )


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
    if cells.is_text_file:
        _check_point(cells, name)
    return WHOLE_NUMBERS if (numbers % 1 == 0).all() else NUMBERS


def _check_point(cells: Cells, name: str) -> None:
    """Raise Question if all numbers are below 1,000 or have three digits after a point, and there are both."""
    if cells.file_format.thousands is not None:
        return
    texts = cells.frame[name].tolist()
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
    width = float(upper - lower)
    magnitude = width or abs(float(upper)) or 1.0
    low = -_rounded_up(-float(lower) + width, -smallest, magnitude)
    high = _rounded_up(float(upper) + width, largest, magnitude)
    if smallest >= 0:
        low = max(0.0, low)
    return low, high


def _rounded_up(usual_end: float, largest: float, magnitude: float) -> float:
    """Return an end beyond the largest number: one digit of a range, three of the end, or one if it is one row's."""
    end = max(usual_end, largest)
    num_digits = 3 if end > largest else 1
    exponents = [math.floor(math.log10(magnitude))]
    if end:
        exponents.append(math.floor(math.log10(abs(end))) - num_digits + 1)
    step = 10.0 ** max(exponents)
    rounded_end = step * (math.floor(end / step) + 1)
    return float(f"{rounded_end:.12g}")
