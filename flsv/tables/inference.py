"""Inference of a data dictionary from a table.

A column whose meaning is not clear is excluded, and the reason is a question, which somebody has to answer.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import pandas as pd
from pandas.api.types import (
    infer_dtype,
    is_bool_dtype,
    is_datetime64_any_dtype,
    is_numeric_dtype,
)

from flsv.data.groups import check_spelling
from flsv.data.labels import in_declared_order
from flsv.tables.dictionary import (
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
from flsv.tables.table import Table, numbers_of
from flsv.utilities.errors import ConfigurationError, listed

#: Smallest number of rows of a category that a site's inferred dictionary names.
MIN_ROWS = 5
#: Largest number of categories of a column whose kind the user has not set.
MAX_CATEGORIES = 50
#: Smallest number of values that are compared.
MIN_COMPARED = 20
#: Largest number of different units behind a column's numbers. Texts with more are categories.
MAX_UNITS = 3
#: Smallest number of different values of an identifier: of a column with such a name, and of one with running numbers.
MIN_IDENTIFIERS = 20
MIN_RUNNING_NUMBERS = 100
#: Number of digits of inferred means and scales, relative to the standard deviation.
NUM_DIGITS = 7
#: A site rounds means and scales to its deviation divided by its number of rows, but at most by this number.
MAX_ROUNDING = 1000
#: Codes of missing values: 9, 99, -999, ...
_NINES = re.compile(r"-?9+")
#: Names of columns that identify the person or the case of a row.
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
    """Question that the user has to answer: what a column means, or how it is written."""


def infer(
    table: Table,
    dictionary: Dictionary,
    rows_by_site: Mapping[str, np.ndarray],
    leaves_site: bool = False,
) -> dict[str, Dictionary]:
    """Infer a complete dictionary for each site whose rows a table has.

    Args:
        table: the table, whose rows have a target.
        dictionary: what the user has written, at least the target.
        rows_by_site: positions of each site's rows.
        leaves_site: whether the dictionary is sent to others. Then it hides counts below five, and numbers are rounded.

    Returns:
        Each site's dictionary.
    """
    for name in (dictionary.target, *dictionary.columns):
        table.check_has(name, "the data dictionary")

    excluded = dict(dictionary.excluded)
    columns_by_site: dict[str, dict[str, Column]] = {site: {} for site in rows_by_site}
    for name in _column_names(table, dictionary):
        written_column = dictionary.columns.get(name, Column())
        try:
            column, values = _read_column(table, name, written_column)
        except Question as question:
            excluded[name] = f"? {question}"  # until the user answers
            continue
        for site, rows in rows_by_site.items():
            has_all_rows = len(rows) == len(values)
            values_of_site = values if has_all_rows else values.iloc[rows]
            columns_by_site[site][name] = inferred_column(column, values_of_site, leaves_site)

    dictionary_by_site = {}
    for site, rows in rows_by_site.items():
        site_dictionary = replace(dictionary, columns=columns_by_site[site], excluded=excluded)
        dictionary_by_site[site] = with_target(site_dictionary, table.take(rows), leaves_site)
    return dictionary_by_site


def _column_names(table: Table, dictionary: Dictionary) -> list[str]:
    """Return the columns to infer: those that the dictionary names, and all others unless it excludes them."""
    if REST in dictionary.excluded:
        return [name for name in table.frame if name in dictionary.columns]
    other_names = {dictionary.target, *dictionary.excluded}
    return [name for name in table.frame if name not in other_names]


def with_target(dictionary: Dictionary, table: Table, leaves_site: bool = False) -> Dictionary:
    """Infer the classes, or mean and scale of numbers to predict."""
    if dictionary.task == "regression":
        numbers = pd.Series(table.numbers(dictionary.target))
        target = inferred_column(Column(NUMBERS), numbers, leaves_site)
        return with_target_column(dictionary, target)

    words = table.words(dictionary.target, "target")
    classes = dictionary.classes
    if classes is None:
        names = list(words.cat.categories)
        order = table.declared_order(dictionary.target)
        classes = in_declared_order(names, {table.name: order}, f"The target {dictionary.target!r}")
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
            f"All training rows have the same value of the target {dictionary.target!r}, which therefore cannot be "
            "standardized. Set standardize_target: false in the data dictionary."
        )
    return replace(dictionary, target_mean=target.mean or 0.0, target_scale=target.scale)


def _read_column(
    table: Table,
    name: str,
    column: Column,
) -> tuple[Column, pd.Series]:
    """Return a column with its kind, and the table's values in it. Raise Question if the kind is not clear."""
    kind = column.kind or kind_of(table, name, column)
    values = _values_of_kind(table, name, replace(column, kind=kind))
    if not column.kind:
        _check_no_identifier(table, name, kind, values)
    if kind == CATEGORIES:
        check_spelling_of_words(values.cat.categories, table.title)
    elif kind != TRUTHS:
        _check_no_isolated_value(table, name, column, values)
    return replace(column, kind=kind), values


def _values_of_kind(table: Table, name: str, column: Column) -> pd.Series:
    """Return the values of a column whose kind is known. Raise Question if a field is not of this kind."""
    # Bounds and categories are inferred from the values, so at first all values fit that are of the kind.
    unlimited_column = replace(
        column,
        low=None,
        high=None,
        other_words=True,
        gaps=column.gaps or True,
    )
    values, is_misfit = unlimited_column.values(table, name)
    if is_misfit.any():
        row = int(np.argmax(is_misfit))
        value = str(table.frame[name].iloc[row])
        raise Question(
            f"{table.where([row])}: the other fields are {column.kind}, but this one is {value!r}. Does it mean a "
            "missing value (add it to gaps), is it a number in another format (set read) or with a unit (set unit), or "
            "are these categories (set kind)?"
        )
    return values


def _check_no_identifier(table: Table, name: str, kind: str, values: pd.Series) -> None:
    """Raise Question if values look like identifiers of rows, persons or cases, or are too many categories."""
    if kind not in (WHOLE_NUMBERS, CATEGORIES):
        return
    num_values = values.nunique()
    has_name_of_identifier = num_values >= MIN_IDENTIFIERS and _IDENTIFIER.fullmatch(name)
    are_running_numbers = False
    if kind == WHOLE_NUMBERS and num_values == len(values) >= MIN_RUNNING_NUMBERS:
        are_running_numbers = values.max() - values.min() < 2 * num_values
    if has_name_of_identifier or are_running_numbers:
        raise Question(
            f"{table.title} has {num_values} different values, as an identifier of persons or cases has. Exclude the "
            "column, or set its kind"
        )
    if kind == CATEGORIES and num_values > MAX_CATEGORIES:
        raise Question(
            f"{table.title} has {num_values} different words, as an identifier or free text has. Exclude the column, "
            "or set kind: categories, which makes a feature of each"
        )


def _check_no_isolated_value(table: Table, name: str, column: Column, values: pd.Series) -> None:
    """Raise Question if values are isolated on a side on which the user has set no bound."""
    isolated_values = isolated_numbers(values.dropna().to_numpy(dtype=float))
    if not len(isolated_values):
        return
    is_below = isolated_values[0] <= values.min()
    bound_name = "low" if is_below else "high"
    if getattr(column, bound_name) is not None:
        return
    row = int(np.argmax(values == isolated_values[0]))
    value = str(table.frame[name].iloc[row])
    raise Question(
        f"{table.where([row])}: {value!r} is farther from all other values than these are from each other. Does it "
        "mean a missing value (add it to gaps), is it in another unit (correct it), or does it fit (set "
        f"{bound_name})?"
    )


def isolated_numbers(numbers: np.ndarray) -> np.ndarray:
    """Return the numbers that are farther from all others than these are from each other, ascending, or none.

    The gap between them and the others has to be wider than the range of the others. This is enough for a code of
    missing values (9, 99, -999, ...). Other numbers are isolated only beside at least 20 different numbers. If none is
    negative, the gap also has to be wider than the range in ``log(1 + x / s)``, where ``s`` is the median distance from
    the median. So no number of a skewed distribution, such as of money, is isolated.

    Negative numbers that are all one code are isolated without a gap. Zeros never are.

    Example:
        >>> isolated_numbers(np.array([*range(60), 99, -999.0]))
        array([-999.])
        >>> isolated_numbers(np.geomspace(1, 1e6, 60))
        array([], dtype=float64)
    """
    no_numbers = np.array([])
    if len(numbers) < MIN_COMPARED:
        return no_numbers
    numbers = np.sort(numbers)
    negative_numbers = numbers[numbers < 0]
    if _is_code(negative_numbers):
        return negative_numbers

    logarithms = _logarithms(numbers)
    split = int(np.argmax(np.diff(logarithms))) + 1  # the first number after the widest gap
    few_numbers, many_numbers = _smaller_and_larger_part(numbers, split)
    are_zeros = not few_numbers.any()
    if are_zeros or not _has_wide_gap(numbers, split):
        return no_numbers
    if _is_code(few_numbers):
        return few_numbers
    are_few_values = len(np.unique(many_numbers)) < MIN_COMPARED  # such as doses of 5, 10 and 20
    if are_few_values or not _has_wide_gap(logarithms, split):
        return no_numbers
    return few_numbers


def _smaller_and_larger_part(numbers: np.ndarray, split: int) -> list[np.ndarray]:
    return sorted([numbers[:split], numbers[split:]], key=len)


def _has_wide_gap(numbers: np.ndarray, split: int) -> bool:
    """Return whether the gap before ``numbers[split]`` is wider than the range of the larger part of the numbers."""
    _, larger_part = _smaller_and_larger_part(numbers, split)
    gap = numbers[split] - numbers[split - 1]
    return bool(gap > np.ptp(larger_part) > 0)


def _logarithms(numbers: np.ndarray) -> np.ndarray:
    """Return ``log(1 + x / s)`` of ascending numbers, or the numbers themselves if one is negative."""
    distances = np.abs(numbers - np.median(numbers))
    unit = np.median(distances) or distances.mean()
    if numbers[0] < 0 or not unit:
        return numbers
    return np.log1p(numbers / unit)


def _is_code(numbers: np.ndarray) -> bool:
    distinct_numbers = set(numbers.tolist())
    return len(distinct_numbers) == 1 and bool(_NINES.fullmatch(f"{distinct_numbers.pop():.15g}"))


def inferred_column(column: Column, values: pd.Series, leaves_site: bool = False) -> Column:
    """Infer a complete column from the values of a site's rows, with NaN for missing ones."""
    known_values = values.dropna()
    num_missing = len(values) - len(known_values)
    if num_missing == 0 and column.gaps is True:
        column = replace(column, gaps=False)
    # Other sites must not learn what is true of a few rows only, so these count with the rest.
    min_rows = MIN_ROWS if leaves_site else 1
    if len(known_values) < min_rows:
        known_values = known_values.iloc[:0]
    if num_missing < min_rows:
        num_missing = 0
    count = 0
    if len(known_values):
        count = len(values) - num_missing
    column = replace(column, count=count, missing=len(values) - count)

    if column.kind == CATEGORIES:
        if column.is_complete:
            return column
        return _with_categories(column, known_values, min_rows)
    if known_values.empty:
        return replace(
            column,
            mean=column.mean or 0.0,
            scale=column.scale or 1.0,
        )
    return _with_numbers(column, known_values.to_numpy(dtype=float), leaves_site)


def _with_categories(column: Column, words: pd.Series, min_rows: int) -> Column:
    counts = words.cat.remove_unused_categories().value_counts()
    frequent_words = counts.index[counts >= min_rows]
    has_rare_words = len(frequent_words) < len(counts)
    return replace(
        column,
        categories=tuple(sorted(frequent_words)),
        other_words=column.other_words or has_rare_words,
    )


def _with_numbers(column: Column, numbers: np.ndarray, leaves_site: bool) -> Column:
    """Infer the bounds, mean and scale that the user has not set."""
    low, high = wide_range(numbers)
    if column.low is not None:
        low = column.low
    if column.high is not None:
        high = column.high
    if column.mean is None or column.scale is None:
        mean, scale = _coarse_moments(numbers) if leaves_site else _moments(numbers)
        column = replace(column, mean=mean, scale=scale)
    return replace(column, low=low, high=high)


def _moments(numbers: np.ndarray) -> tuple[float, float]:
    deviation = float(numbers.std())
    return rounded(float(numbers.mean()), deviation), rounded(deviation, deviation)


def _coarse_moments(numbers: np.ndarray) -> tuple[float, float]:
    """Return mean and standard deviation, rounded so far that they do not reveal a single row.

    They are rounded to the deviation divided by the number of rows or by 1000. If all rows but fewer than five have the
    same number, the column counts as constant.
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
    owners: Mapping[str, Sequence[str]] | None = None,
) -> None:
    """Raise Question if two words are spellings of one word. Numbers are not compared."""
    texts = [word for word in words if not _ANY_NUMBER.fullmatch(word)]
    try:
        check_spelling(texts, where, owners)
    except ConfigurationError as error:
        raise Question(str(error)) from error


def kind_of(table: Table, name: str, column: Column) -> str:
    """Infer a column's kind. Raise Question if it is not clear."""
    if column.categories is not None:
        return CATEGORIES
    typed_fields = table.frame[name]
    if isinstance(typed_fields.dtype, pd.CategoricalDtype):
        return CATEGORIES
    if is_bool_dtype(typed_fields):
        return TRUTHS
    if not table.is_text_file:
        type_of_fields = infer_dtype(typed_fields, skipna=True)
        if type_of_fields in ("mixed", "mixed-integer"):
            raise Question(f"{table.title} has values of several types. Convert them to one type")
        if type_of_fields == "complex":
            raise Question(
                f"{table.title} has complex numbers. Make two columns of their real and imaginary parts"
            )
    if not is_numeric_dtype(typed_fields):
        return _kind_of_texts(table, name, column)
    return _kind_of_numbers(table, name, typed_fields.dropna())


def _kind_of_texts(table: Table, name: str, column: Column) -> str:
    words = table.words(name)
    gap_marks = column.gap_marks(table.is_text_file)
    texts = [text for text in words.cat.categories if text not in gap_marks]
    if not texts:
        return NUMBERS
    if set(texts) <= NUMBER_BY_TRUTH.keys():
        return TRUTHS
    if is_datetime64_any_dtype(table.frame[name]) or all(map(_DATE.fullmatch, texts)):
        raise Question(
            f"{table.title} has dates, such as {texts[0]!r}. Make numbers of them: set kind: {DAYS}1970, or kind: "
            f"{DAYS}<another column>"
        )

    numbers = numbers_of(pd.Series(texts, dtype=object), table.file_format, column.unit)
    is_number = np.isfinite(numbers)
    _check_format(table, words, texts, is_number)
    if not is_number.any():
        _check_units(texts)
        return CATEGORIES
    if _are_codes(texts):
        return CATEGORIES
    return _kind_of_numbers(table, name, pd.Series(numbers[is_number]))


def _are_codes(texts: Collection[str]) -> bool:
    """Return whether numbers are codes: one begins with a zero, as 01067, or each with a plus, as +4930."""
    have_zeros = any(map(_LEADING_ZERO.fullmatch, texts))
    return have_zeros or (bool(texts) and all(map(_DIALED_NUMBER.fullmatch, texts)))


def _check_units(texts: Sequence[str]) -> None:
    matches = [match for text in texts if (match := _WITH_UNIT.fullmatch(text))]
    if len(matches) < len(texts):
        return
    units = sorted({match[2] for match in matches})
    if len(units) == 1:
        raise Question(
            f"{texts[0]!r} is a number with a unit. Set unit: {units[0]!r}, or kind: categories"
        )
    if len(units) <= MAX_UNITS and all(match[1] for match in matches):
        raise Question(
            f"{texts[0]!r} is a number with a unit, but the column has the units {listed(units, show=repr)}. Write all "
            "numbers of the table in one unit, or set kind: categories"
        )


def _check_format(
    table: Table,
    words: pd.Series,
    texts: Sequence[str],
    is_number: np.ndarray,
) -> None:
    """Raise Question if a text is a number in another format than the file's."""
    for text, is_in_format in zip(texts, is_number):
        if not is_in_format and _ANY_NUMBER.fullmatch(text):
            row = int(np.argmax(words == text))
            raise Question(
                f"{table.where([row])}: is {text!r} a number in another format (set decimal or thousands in read), or "
                "not a number (set kind: categories)?"
            )


def _kind_of_numbers(table: Table, name: str, numbers: pd.Series) -> str:
    if table.is_text_file:
        _check_point(table, name)
    return WHOLE_NUMBERS if (numbers % 1 == 0).all() else NUMBERS


def _check_point(table: Table, name: str) -> None:
    """Raise Question if it is not clear whether a point separates thousands.

    This is so if some numbers have three digits after a point, and all others have at most three digits.
    """
    if table.file_format.thousands is not None:
        return
    texts = table.frame[name].tolist()
    distinct_texts = set(texts)
    grouped_numbers = set(filter(_GROUPED_NUMBER.fullmatch, distinct_texts))
    short_numbers = set(filter(_SHORT_NUMBER.fullmatch, distinct_texts))
    remaining_texts = distinct_texts - grouped_numbers - short_numbers
    has_other_numbers = any(text[-1:].isdigit() for text in remaining_texts)
    if grouped_numbers and short_numbers and not has_other_numbers:
        grouped = max(grouped_numbers)
        short = max(short_numbers)
        row = texts.index(grouped)
        raise Question(
            f"{table.where([row])}: does the point of {grouped!r} separate thousands? The column also has {short!r}. "
            'Set thousands: "." in read, or kind: numbers'
        )


def rounded(number: float, deviation: float) -> float:
    """Round a number to ``NUM_DIGITS`` digits of a standard deviation."""
    size = deviation or abs(number) or 1.0
    return round(number, NUM_DIGITS - math.floor(math.log10(size)))


def wide_range(numbers: np.ndarray) -> tuple[float, float]:
    """Return rounded bounds far beyond most numbers, which hide the number of a single row.

    If there are only two different numbers, each in at least five rows, return these.

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

    # The range between the percentiles is widened by its width at both ends.
    percentile_1, percentile_99 = np.quantile(numbers, (0.01, 0.99)).tolist()
    width = percentile_99 - percentile_1
    magnitude = width or abs(percentile_99) or 1.0
    low = -_rounded_up(width - percentile_1, -smallest, magnitude)
    high = _rounded_up(width + percentile_99, largest, magnitude)
    if smallest >= 0:
        low = max(0.0, low)
    return low, high


def _rounded_up(usual_end: float, largest: float, magnitude: float) -> float:
    """Round ``usual_end``, or a larger ``largest`` number, up.

    It is rounded to one digit of ``magnitude``, and to three digits of its own, or to one if it is a row's own number.
    """
    end = max(usual_end, largest)
    num_digits = 3 if end > largest else 1
    exponents = [math.floor(math.log10(magnitude))]
    if end:
        exponents.append(math.floor(math.log10(abs(end))) - num_digits + 1)
    step = 10.0 ** max(exponents)
    rounded_end = step * (math.floor(end / step) + 1)
    return float(f"{rounded_end:.12g}")
