"""Merge of several sites' inferred dictionaries, and comparison of a table with its data dictionary."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd

from flsv.data.groups import check_spelling
from flsv.data.labels import in_declared_order, in_order, positive_last
from flsv.data.sources.table_facts import TableWarning
from flsv.tables.dictionary import (
    CATEGORIES,
    NUMBERS,
    WHOLE_NUMBERS,
    Column,
    Dictionary,
)
from flsv.tables.inference import (
    MIN_COMPARED,
    Question,
    check_spelling_of_words,
    infer,
    inferred_column,
    kind_of,
    rounded,
    with_target_column,
)
from flsv.tables.table import FileFormat, Table
from flsv.utilities.errors import ConfigurationError, listed

# Above these, a site's column differs so much from the others' that there is a data warning.
#: Ratio of means and deviations that are in two units, if there are many rows.
MAX_RATIO = 2.1
#: Difference of means, in deviations.
MAX_SHIFT = 2.0
#: Difference of the shares of missing values.
MAX_MISSING_DIFFERENCE = 0.25
#: Of more sites, each is compared with all sites instead of all others, which would take seconds.
MAX_SITES_COMPARED_WITH_OTHERS = 30
#: Of more clients, one dictionary for each table is inferred instead of one for each client.
MAX_DICTIONARIES = 100
#: Strength of a difference that cannot be due to chance.
_CERTAIN = 4.0
# Names of what a site is compared with, beside the sites' names.
_DICTIONARY = "the dictionary"
_CLIENTS = "the clients"
#: Name of the rows that no client trains on.
_UNTRAINED = ""
#: Arguments that are equal in all dictionaries that are merged.
_SHARED_SETTINGS = ("target", "task", "standardize_target", "positive")


def merge(dictionary_by_site: Mapping[str, Dictionary]) -> tuple[Dictionary, list[TableWarning]]:
    """Merge several sites' inferred dictionaries, by the sites' names.

    Returns:
        The dictionary, which does not depend on the order of the sites, and data warnings where sites differ.
    """
    merged, data_warnings = _merge_columns(dictionary_by_site, subject_site=None)
    dictionary = _with_merged_target(dictionary_by_site)
    columns = dict(merged.columns)
    excluded = dict(merged.excluded)
    for name, column in merged.columns.items():
        if column.missing and not column.count:
            del columns[name]
            excluded[name] = "? no row of any site has a value. Exclude the column"
    return replace(dictionary, columns=columns, excluded=excluded), data_warnings


def _merge_columns(
    dictionary_by_site: Mapping[str, Dictionary], subject_site: str | None
) -> tuple[Dictionary, list[TableWarning]]:
    """Return a dictionary of all columns, without a target, and data warnings about ``subject_site``, or all sites."""
    excluded: dict[str, str] = {}
    names: dict[str, None] = {}  # each once, in order
    for dictionary in dictionary_by_site.values():
        excluded = {**dictionary.excluded, **excluded}  # the reason of the first site stays
        names.update(dict.fromkeys(dictionary.columns))

    columns = {}
    data_warnings: list[TableWarning] = []
    for name in names:
        if name in excluded:
            continue
        column_by_site = _column_by_site(dictionary_by_site, name)
        sites_without = dictionary_by_site.keys() - column_by_site
        try:
            _check_same_meaning(column_by_site, sites_without=sites_without)
            columns[name] = pooled(list(column_by_site.values()))
        except Question as question:
            excluded[name] = f"? {question}"  # until the user answers
            continue
        data_warnings += _disagreements(name, column_by_site, subject_site=subject_site)
    return Dictionary(columns=columns, excluded=excluded), data_warnings


def _column_by_site(dictionary_by_site: Mapping[str, Dictionary], name: str) -> dict[str, Column]:
    column_by_site = {}
    for site, dictionary in dictionary_by_site.items():
        if name in dictionary.columns:
            column_by_site[site] = dictionary.columns[name]
    return column_by_site


def _check_same_meaning(
    column_by_site: Mapping[str, Column], sites_without: Collection[str]
) -> None:
    """Raise Question if a column is missing at a site, or sites have several kinds or spellings of it."""
    if sites_without:
        raise Question(
            f"the column is in the tables of {listed(column_by_site)}, but not of {listed(sorted(sites_without))}. "
            "Exclude it, add it to all tables, or give another column this name (rename in read)"
        )

    sites_by_word: dict[str, list[str]] = {}
    for site, column in column_by_site.items():
        for word in column.categories or ():
            sites_by_word.setdefault(word, []).append(site)
    _check_kinds(column_by_site)
    check_spelling_of_words(sites_by_word, "the column", sites_by_word)
    _check_units(column_by_site)
    _check_words_are_shared(column_by_site)


def _check_kinds(column_by_site: Mapping[str, Column]) -> None:
    sites_by_kind: dict[str, list[str]] = {}
    for site, column in column_by_site.items():
        if column.count:  # the kind of an empty column is not known
            kind = NUMBERS if column.kind == WHOLE_NUMBERS else column.kind
            sites_by_kind.setdefault(kind, []).append(site)
    if len(sites_by_kind) > 1:
        kinds = [f"{kind} at {listed(sites)}" for kind, sites in sites_by_kind.items()]
        raise Question(
            f"the sites have {' and '.join(kinds)}. Do they code the same thing in two ways, or write a unit? Set the "
            "column's kind, or exclude it"
        )


def _check_units(column_by_site: Mapping[str, Column]) -> None:
    site_by_unit: dict[str, str] = {}
    for site in sorted(column_by_site):
        unit = column_by_site[site].unit
        if unit:
            site_by_unit.setdefault(unit, site)
    if len(site_by_unit) > 1:
        units = [f"{unit} at {site}" for unit, site in site_by_unit.items()]
        raise Question(f"the unit is {' and '.join(units)}. Use the same unit in all tables")


def _check_words_are_shared(column_by_site: Mapping[str, Column]) -> None:
    """Raise Question if categories reveal the site: it shares none with others, or two sites use two pairs of codes."""
    words_by_site = {}
    for site in sorted(column_by_site):
        column = column_by_site[site]
        if column.categories and column.count >= MIN_COMPARED:
            words_by_site[site] = set(column.categories)
    for site, words in words_by_site.items():
        words_elsewhere = set()
        for other_site, other_words in words_by_site.items():
            if _are_different_codes(words, other_words):
                raise _question_of_words(site, words, f"{other_site} has {_in_words(other_words)}")
            if other_site != site:
                words_elsewhere |= other_words
        if words_elsewhere and words.isdisjoint(words_elsewhere):
            raise _question_of_words(site, words, "no other site has one of these")


def _are_different_codes(words: set[str], other_words: set[str]) -> bool:
    """Return whether two sites number two values in different ways, such as 0 and 1, and 1 and 2."""
    have_two_values = len(words) == len(other_words) == 2
    if not have_two_values or words == other_words:
        return False
    return all(word.isdecimal() for word in words | other_words)


def _question_of_words(site: str, words: set[str], finding: str) -> Question:
    return Question(
        f"{site} has {_in_words(words)}, and {finding}, so that the model would learn which site a row is from. Do the "
        "sites code the same thing in two ways? Use the same words in all tables (recode in read), exclude the column, "
        "or name all its categories"
    )


def _in_words(words: set[str]) -> str:
    return listed(sorted(words), 4, repr)


def pooled(columns: Sequence[Column]) -> Column:
    """Pool columns of several sites: all categories, the widest range, mean and scale weighted by numbers of rows."""
    # Columns without a value say nothing of their kind and range.
    columns_with_rows = [column for column in columns if column.count] or list(columns)
    first_column = columns_with_rows[0]
    kinds = {column.kind for column in columns_with_rows}
    pooled_column = replace(
        first_column,
        unit=max(column.unit for column in columns_with_rows),
        kind=first_column.kind if len(kinds) == 1 else NUMBERS,
        low=_finite(min(column.bounds[0] for column in columns_with_rows)),
        high=_finite(max(column.bounds[1] for column in columns_with_rows)),
        other_words=any(column.other_words for column in columns_with_rows),
        gaps=_pooled_marks(columns_with_rows) or any(column.gaps for column in columns),
        count=sum(column.count for column in columns_with_rows),
        missing=sum(column.missing for column in columns),
    )
    if first_column.categories is None:
        return _with_moments(pooled_column, columns_with_rows)
    words: set[str] = set()
    for column in columns_with_rows:
        words.update(column.categories or ())
    return replace(pooled_column, categories=tuple(sorted(words)))


def _pooled_marks(columns: Sequence[Column]) -> tuple[str, ...]:
    """Return the texts that mean a missing value in one of the columns."""
    marks: set[str] = set()
    for column in columns:
        if not isinstance(column.gaps, bool):
            marks.update(column.gaps)
    return tuple(sorted(marks))


def _with_moments(pooled_column: Column, columns: Sequence[Column]) -> Column:
    """Return the pooled column with mean and scale of all columns, weighted by numbers of rows."""
    num_rows = [max(column.count, 1) for column in columns]
    means = [column.mean or 0.0 for column in columns]
    deviations = [column.scale or 0.0 for column in columns]
    different_moments = {*zip(means, deviations)}
    if len(different_moments) == 1:  # set in the data dictionary, so not rounded again
        return pooled_column

    # Exact sums do not depend on the order of the sites.
    total_rows = sum(num_rows)
    sums = [count * mean for count, mean in zip(num_rows, means)]
    pooled_mean = math.fsum(sums) / total_rows
    squares = []
    for count, mean, deviation in zip(num_rows, means, deviations):
        squares.append(count * (deviation**2 + (mean - pooled_mean) ** 2))
    scale = math.sqrt(math.fsum(squares) / total_rows)
    return replace(pooled_column, mean=rounded(pooled_mean, scale), scale=rounded(scale, scale))


def _finite(bound: float) -> float | None:
    return bound if math.isfinite(bound) else None


@dataclass(frozen=True)
class _Difference:
    """Difference of a site's numbers from the others'. There is a data warning if the strength is above 1."""

    strength: float
    text: str


def _disagreements(
    name: str,
    column_by_site: Mapping[str, Column],
    subject_site: str | None,
    usual_source: str = "elsewhere",
) -> Iterator[TableWarning]:
    """Compare each site's column with the pooled column of all others. Texts call these ``usual_source``."""
    # If one site has another unit, all others differ from the mean, so only the largest difference is a warning.
    farthest: TableWarning | None = None
    largest_strength = 1.0
    for site, usual_column in _usual_columns(column_by_site):
        if subject_site not in (None, site):
            continue
        column = column_by_site[site]
        num_compared = min(_num_rows(column), _num_rows(usual_column))
        if num_compared < MIN_COMPARED:
            continue
        for text in _differences_of_fields(column, usual_column, usual_source):
            yield TableWarning(site, name, text)
        difference = _difference(column, usual_column, usual_source)
        if difference.strength > largest_strength:
            largest_strength = difference.strength
            farthest = TableWarning(site, name, difference.text)
    if farthest is not None:
        yield farthest


def _usual_columns(column_by_site: Mapping[str, Column]) -> Iterator[tuple[str, Column]]:
    """Yield each site with the pooled column of the other sites or, of many sites, of all."""
    all_columns = list(column_by_site.values())
    if len(all_columns) < 2:
        return
    usual_column = pooled(all_columns)
    for site, column in column_by_site.items():
        if len(all_columns) <= MAX_SITES_COMPARED_WITH_OTHERS:
            usual_column = pooled(
                [candidate for candidate in all_columns if candidate is not column]
            )
        yield site, usual_column


def _num_rows(column: Column) -> int:
    return column.count + column.missing


def _differences_of_fields(
    column: Column, usual_column: Column, usual_source: str
) -> Iterator[str]:
    """Describe a larger share of missing values, and words that no other site has."""
    share_missing = column.missing / _num_rows(column)
    usual_share = usual_column.missing / _num_rows(usual_column)
    if share_missing - usual_share > MAX_MISSING_DIFFERENCE:
        yield f"{100 * share_missing:.0f} % of the values are missing, {100 * usual_share:.0f} % {usual_source}"
    words = set(column.categories or ())
    new_words = words.difference(usual_column.categories or ())
    if new_words:
        yield f"no other site has {listed(sorted(new_words))}"


def _difference(column: Column, usual_column: Column, usual_source: str) -> _Difference:
    is_comparable = min(column.count, usual_column.count) >= MIN_COMPARED
    if column.categories is not None or not is_comparable:
        return _Difference(0.0, "")
    low, high = column.bounds
    usual_low, usual_high = usual_column.bounds
    if high - low == usual_high - usual_low == 1 and low != usual_low:
        codes = f"{low:g} or {high:g}"
        usual_codes = f"{usual_low:g} or {usual_high:g}"
        return _Difference(
            _CERTAIN,
            f"the values are {codes}, {usual_source} {usual_codes}: is the same thing coded in two ways?",
        )
    return _difference_of_means(column, usual_column, usual_source)


def _difference_of_means(column: Column, usual_column: Column, usual_source: str) -> _Difference:
    mean, scale = column.mean or 0.0, column.scale or 0.0
    usual_mean, usual_scale = usual_column.mean or 0.0, usual_column.scale or 0.0
    if not scale or not usual_scale:
        strength = _CERTAIN if usual_scale else 0.0
        return _Difference(strength, f"all values are {mean:g}, but {usual_source} they differ")
    if mean * usual_mean > 0:
        ratios = (mean / usual_mean, scale / usual_scale)
        strength = _strength_of_unit(ratios, num_values=column.count)
        if strength:
            text = f"the values are {ratios[0]:.3g} times those {usual_source}: are they in another unit?"
            return _Difference(strength, text)
    text = f"the mean is {mean:.4g}, {usual_source} {usual_mean:.4g}"
    return _Difference(abs(mean - usual_mean) / max(scale, usual_scale) / MAX_SHIFT, text)


def _strength_of_unit(ratios: tuple[float, float], num_values: int) -> float:
    """Return how strongly the ratios of means and of scales point to another unit, or 0."""
    log_of_means, log_of_scales = map(math.log, ratios)
    size = abs(log_of_means + log_of_scales) / 2
    allowed_size = math.log(MAX_RATIO) + 6 / math.sqrt(num_values)  # for skewed values
    if abs(log_of_means - log_of_scales) < math.log(2) and size > allowed_size:
        return 2 * size / allowed_size
    return 0.0


def _with_merged_target(dictionary_by_site: Mapping[str, Dictionary]) -> Dictionary:
    """Return a dictionary with the classes of all sites, but without columns."""
    first_site, first_dictionary = next(iter(dictionary_by_site.items()))
    formats: dict[str, FileFormat] = {}
    for site, dictionary in dictionary_by_site.items():
        _check_shared_settings(first_site, first_dictionary, site, dictionary)
        for name, file_format in dictionary.read.items():
            if formats.setdefault(name, file_format) != file_format:
                raise ConfigurationError(
                    f"read: the sites' dictionaries have two formats for {name!r}. Give the sites' files different "
                    "names."
                )
    merged = replace(first_dictionary, read=formats)
    if merged.task == "regression":
        targets = list(map(_target_column, dictionary_by_site.values()))
        return with_target_column(merged, pooled(targets))
    return _with_merged_classes(merged, dictionary_by_site)


def _check_shared_settings(
    first_site: str, first_dictionary: Dictionary, site: str, dictionary: Dictionary
) -> None:
    for setting in _SHARED_SETTINGS:
        value = getattr(dictionary, setting)
        first_value = getattr(first_dictionary, setting)
        if value != first_value:
            raise ConfigurationError(
                f"The sites' dictionaries differ in {setting}: it is {value!r} at {site} and {first_value!r} at "
                f"{first_site}. Use the same value at all sites."
            )


def _target_column(dictionary: Dictionary) -> Column:
    (count,) = dictionary.class_counts or (0,)
    return Column(
        NUMBERS,
        mean=dictionary.target_mean,
        scale=dictionary.target_scale,
        count=max(count, 1),
    )


def _with_merged_classes(
    dictionary: Dictionary, dictionary_by_site: Mapping[str, Dictionary]
) -> Dictionary:
    counts = _counts_by_class(dictionary_by_site)
    orders = {}
    for site in sorted(dictionary_by_site):
        orders[site] = tuple(dictionary_by_site[site].classes or ())
    if len(set(orders.values())) == 1:
        classes = tuple(dictionary.classes or ())
    else:
        is_sorted = all(order == in_order(order) for order in orders.values())
        if is_sorted or dictionary.positive is not None:
            orders = {}  # no site declares an order, or the positive class decides
        classes = classes_by_site(counts, dictionary.target, dictionary.positive, orders)
    totals = counts.sum(axis=1).loc[list(classes)]
    class_counts = tuple(int(total) for total in totals)
    dictionary = replace(dictionary, classes=classes, class_counts=class_counts)
    return replace(dictionary, positive=classes[-1]) if len(classes) == 2 else dictionary


def _counts_by_class(dictionary_by_site: Mapping[str, Dictionary]) -> pd.DataFrame:
    counts_by_site = {}
    for site, dictionary in dictionary_by_site.items():
        classes = dictionary.classes or ()
        # A site may have deleted its counts before it sent the dictionary.
        class_counts = dictionary.class_counts or [1] * len(classes)
        counts_by_site[site] = pd.Series(class_counts, index=classes, dtype=float)
    return pd.DataFrame(counts_by_site).fillna(0.0)


def classes_by_site(
    counts: pd.DataFrame,
    target: str,
    positive: Any,
    orders: Mapping[str, Sequence[str]],
) -> tuple[str, ...]:
    """Return all classes, the positive one of two last, by each site's number of rows of each class.

    They are in the sites' declared ``orders``, or else sorted.
    """
    where = f"The target {target!r}"
    classes = in_declared_order(list(counts.index), orders, where)
    owners = {name: list(counts.columns[counts.loc[name] > 0]) for name in classes}
    check_spelling(classes, where, owners)
    _check_classes(counts, target)
    if positive is not None and len(classes) > 2:
        classes_of_sites = [f"{name!r} at {listed(owners[name])}" for name in classes]
        raise ConfigurationError(
            f"The target {target!r} has the classes {', '.join(classes_of_sites)}, but pos_label={positive!r} needs "
            "exactly two. If sites code the same classes in two ways, use the same words in all tables. If not, "
            "remove pos_label."
        )
    return positive_last(classes, positive)


def check_number_of_classes(num_classes: int, num_rows: int, target: str) -> None:
    """Raise ConfigurationError if more than half of the rows have a class of their own."""
    if num_classes > max(2, num_rows / 2):
        raise ConfigurationError(
            f"The target {target!r} has {num_classes} different values in {num_rows} rows, too many for classes. If "
            "they are numbers to predict, set task: regression in the data dictionary."
        )


def _check_classes(counts: pd.DataFrame, target: str) -> None:
    """Raise ConfigurationError if values are not classes, or a site codes them differently.

    ``counts`` has each site's number of rows of each class, indexed by the class.
    """
    num_classes = len(counts)
    num_rows = counts.to_numpy().sum()
    if num_classes < 2:
        raise ConfigurationError(
            f"The target {target!r} has the same value in all rows, {counts.index[0]!r}, but at least 2 classes are "
            'needed. If other sites have more, name all in the data dictionary: classes: ["no", "yes"].'
        )
    check_number_of_classes(num_classes, int(num_rows), target)
    if len(counts.columns) > 1:
        _check_classes_are_shared(counts, target)


def _check_classes_are_shared(counts: pd.DataFrame, target: str) -> None:
    for site in counts:
        has_class = counts[site] > 0
        other_counts = counts.drop(columns=site)
        is_at_others = (other_counts > 0).any(axis=1)
        if has_class.any() and not (has_class & is_at_others).any():
            classes = listed(counts.index[has_class], 8, repr)
            raise ConfigurationError(
                f"The target {target!r} is {classes} at {site}, and no other site has these classes. If the same "
                "classes are coded in two ways, use the same words in all tables. If not, name all classes in the "
                "data "
                'dictionary: classes: ["no", "yes"].'
            )


def infer_all(
    tables: Sequence[tuple[Table, Mapping[str, np.ndarray]]],
    held_out: Sequence[Table],
    dictionary: Dictionary,
    *,
    is_site: bool = False,
) -> tuple[Dictionary, list[TableWarning]]:
    """Infer the dictionary of a federation in one process, or of one site.

    All fields fit it, also those of held-out rows, which do not count in means and scales.

    Args:
        tables: each table, and the positions of each client's training rows in it.
        held_out: tables of which no client has rows.
        dictionary: what the user has written.
        is_site: whether the tables are of one site, whose dictionary is sent to others and merged.
    """
    dictionary_by_site, untrained_dictionaries = _infer_by_site(tables, dictionary, is_site)
    data_warnings: list[TableWarning] = []
    if is_site:
        (merged,) = dictionary_by_site.values()  # a site has one table
    else:
        merged, data_warnings = merge(dictionary_by_site)

    # All other rows have to fit, too.
    merged, _ = _widened(merged, untrained_dictionaries, subject_site=_UNTRAINED)
    for table in held_out:
        all_rows = {table.name: np.arange(len(table))}
        held_out_dictionary = infer(table, dictionary, all_rows, leaves_site=is_site)
        merged, warnings_of_table = _widened(merged, held_out_dictionary, subject_site=table.name)
        data_warnings += warnings_of_table
    return merged, data_warnings


def _infer_by_site(
    tables: Sequence[tuple[Table, Mapping[str, np.ndarray]]], dictionary: Dictionary, is_site: bool
) -> tuple[dict[str, Dictionary], dict[str, Dictionary]]:
    """Infer a dictionary of each client's or each table's training rows, and one of each table's other rows."""
    num_clients = sum(len(rows_by_client) for _, rows_by_client in tables)
    dictionary_by_site: dict[str, Dictionary] = {}
    untrained_dictionaries = {}
    for table, rows_by_client in tables:
        training_rows = np.concatenate([*rows_by_client.values()])
        rows_by_site = dict(rows_by_client)
        if is_site or num_clients > MAX_DICTIONARIES:
            rows_by_site = {table.name: training_rows}
        rows_by_site[_UNTRAINED] = np.setdiff1d(np.arange(len(table)), training_rows)
        dictionaries_of_table = infer(table, dictionary, rows_by_site, leaves_site=is_site)
        untrained_dictionaries[table.name] = dictionaries_of_table.pop(_UNTRAINED)
        dictionary_by_site |= dictionaries_of_table
    return dictionary_by_site, untrained_dictionaries


def _widened(
    merged: Dictionary, dictionary_by_site: Mapping[str, Dictionary], subject_site: str
) -> tuple[Dictionary, Sequence[TableWarning]]:
    """Return a dictionary that held-out fields fit, too, and data warnings about these."""
    wider, data_warnings = _merge_columns({_CLIENTS: merged, **dictionary_by_site}, subject_site)
    columns = {}
    for name, column in wider.columns.items():
        clients_column = merged.columns[name]
        columns[name] = replace(
            column,
            mean=clients_column.mean,
            scale=clients_column.scale,
            count=clients_column.count,
            missing=clients_column.missing,
        )
    return replace(merged, columns=columns, excluded=wider.excluded), data_warnings


def compare(
    dictionary: Dictionary, table: Table, site: str
) -> tuple[dict[str, pd.Series], list[TableWarning]]:
    """Read a site's table by a complete dictionary, and compare the two, for the site's own log.

    Returns:
        The columns' values, and data warnings.

    Raises:
        ConfigurationError: fields do not fit the dictionary, or it is not clear whether they are the numbers that it
            expects.
    """
    values = dictionary.values(table)
    data_warnings: list[TableWarning] = []
    for name, column in dictionary.columns.items():
        if column.has_numbers:
            _check_still_numbers(dictionary, table, site, name)
        unlimited_column = replace(column, low=None, high=None, mean=None, scale=None)
        site_column = inferred_column(unlimited_column, values[name])
        # A column that was written by hand has no count.
        usual_column = replace(column, count=column.count or len(table))
        columns = {_DICTIONARY: usual_column, site: site_column}
        data_warnings += _disagreements(
            name, columns, subject_site=site, usual_source=f"in {_DICTIONARY}"
        )
    return values, data_warnings


def _check_still_numbers(dictionary: Dictionary, table: Table, site: str, name: str) -> None:
    """Raise ConfigurationError if fields that can be read as numbers may be codes, or other numbers."""
    column = dictionary.columns[name]
    unknown_column = Column(gaps=column.gaps, unit=column.unit)
    try:
        if kind_of(table, name, unknown_column) == CATEGORIES:
            raise Question(
                f"the values begin with a zero or a plus, as codes do, but the data dictionary expects {column.kind}. "
                "Set kind: categories, or exclude the column."
            )
    except Question as question:
        description = f"{name!r} ({column.description})"
        raise ConfigurationError(
            f"{site}: {name}: {question}",
            without_data=dictionary.message_without_values([description]),
        ) from question
