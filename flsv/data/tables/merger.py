"""Merger of several sites' drafts to one data dictionary, and comparison of a table with its dictionary."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd

from flsv.data.groups import check_spelling
from flsv.data.labels import in_order, positive_last
from flsv.data.tables.cells import Cells, FileFormat
from flsv.data.tables.dictionary import (
    CATEGORIES,
    NUMBERS,
    WHOLE_NUMBERS,
    Column,
    Dictionary,
)
from flsv.data.tables.drafts import (
    MIN_COMPARED,
    Question,
    TableDoubt,
    check_spelling_of_words,
    draft,
    drafted_column,
    kind_of,
    rounded,
    with_target_column,
)
from flsv.utilities.errors import ConfigurationError, listed

#: From which ratios of units and of deviations on drafts disagree.
MAX_RATIO = 2.1
MAX_RATIO_OF_DEVIATIONS = 4.0
#: From which differences on drafts disagree: of means in deviations, of shares without a value.
MAX_SHIFT = 2.0
MAX_MISSING_DIFFERENCE = 0.25
#: Up to so many sites, each is compared with the others alone, else with all.
MAX_SITES_APART = 30
#: Up to so many clients, each has a draft of its own.
MAX_DRAFTS = 100
#: Strength of a difference that no sampling explains.
_CERTAIN = 4.0
#: Name in doubts of all that is not the site in question.
_DICTIONARY = "the dictionary"
_CLIENTS = "the clients"
#: Name of the rows that no client trains on.
_UNTRAINED = ""
#: Settings that all drafts have in common.
_SHARED_SETTINGS = ("target", "task", "patient", "standardize_target", "positive")


def merge(drafts: Mapping[str, Dictionary]) -> tuple[Dictionary, list[TableDoubt]]:
    """Make one dictionary of several sites' drafts, by the sites' names.

    Returns:
        The dictionary, which does not depend on the order of the sites, and where they disagree.
    """
    merged, doubts = _merge_columns(drafts, subject_site=None)
    dictionary = _with_merged_target(drafts)
    columns = dict(merged.columns)
    excluded = dict(merged.excluded)
    for name, column in merged.columns.items():
        if column.missing and not column.count:
            del columns[name]
            excluded[name] = "? no row has a value"
    return replace(dictionary, columns=columns, excluded=excluded), doubts


def _merge_columns(
    drafts: Mapping[str, Dictionary], subject_site: str | None
) -> tuple[Dictionary, list[TableDoubt]]:
    """Return a dictionary of all columns, without a target, and doubts about one site or all."""
    excluded: dict[str, str] = {}
    names: dict[str, None] = {}
    for dictionary in drafts.values():
        excluded = {**dictionary.excluded, **excluded}
        names |= dict.fromkeys(dictionary.columns)

    columns = {}
    doubts: list[TableDoubt] = []
    for name in names:
        if name in excluded:
            continue

        column_by_site = {}
        for site, dictionary in drafts.items():
            if name in dictionary.columns:
                column_by_site[site] = dictionary.columns[name]
        try:
            _check_same_meaning(column_by_site, sites_without=drafts.keys() - column_by_site)
            columns[name] = pooled(list(column_by_site.values()))
        except Question as question:
            excluded[name] = f"? {question}"
            continue
        doubts += _disagreements(name, column_by_site, subject_site=subject_site)
    return Dictionary(columns=columns, excluded=excluded), doubts


def _check_same_meaning(
    column_by_site: Mapping[str, Column], sites_without: Collection[str]
) -> None:
    """Raise Question if a site lacks a column, or sites have it in several kinds or spellings."""
    if sites_without:
        sites = listed(column_by_site)
        raise Question(f"no such column at {listed(sorted(sites_without))}, and {sites} have it")

    sites_by_kind: dict[str, list[str]] = {}
    sites_by_word: dict[str, list[str]] = {}
    for site, column in column_by_site.items():
        for word in column.categories or ():
            sites_by_word.setdefault(word, []).append(site)
        if column.count:  # of an empty column nobody knows the kind
            kind = NUMBERS if column.kind == WHOLE_NUMBERS else column.kind
            sites_by_kind.setdefault(kind, []).append(site)

    if len(sites_by_kind) > 1:
        kinds = [f"{kind} at {listed(sites)}" for kind, sites in sites_by_kind.items()]
        raise Question(
            f"{' and '.join(kinds)}. Two codings of one thing, or a unit? Say its kind, or leave it out"
        )
    check_spelling_of_words(sites_by_word, "the column", owners=lambda: sites_by_word)
    _check_units(column_by_site)
    _check_words_are_shared(column_by_site)


def _check_units(column_by_site: Mapping[str, Column]) -> None:
    """Raise Question if sites have said several units."""
    site_by_unit: dict[str, str] = {}
    for site in sorted(column_by_site):
        unit = column_by_site[site].unit
        if unit:
            site_by_unit.setdefault(unit, site)
    if len(site_by_unit) > 1:
        units = [f"{unit} at {site}" for unit, site in site_by_unit.items()]
        raise Question(f"the unit is {' and '.join(units)}. Write the same unit in all tables")


def _check_words_are_shared(column_by_site: Mapping[str, Column]) -> None:
    """Raise Question if categories tell whose a row is: no other site has one of them, or two codes differ."""
    words_by_site: dict[str, set[str]] = {}
    for site in sorted(column_by_site):
        column = column_by_site[site]
        if column.categories and column.count >= MIN_COMPARED:
            words_by_site[site] = set(column.categories)
    for site, words in words_by_site.items():
        for other_site, other_words in words_by_site.items():
            are_two_codes = len(words) == len(other_words) == 2 and words != other_words
            if are_two_codes and all(word.isdecimal() for word in words | other_words):
                raise _question_of_words(site, words, f"{other_site} has {_in_words(other_words)}")

        words_elsewhere: set[str] = set()
        for other_site, other_words in words_by_site.items():
            if other_site != site:
                words_elsewhere |= other_words
        if words_elsewhere and words.isdisjoint(words_elsewhere):
            raise _question_of_words(site, words, "no other site has one of these")


def _question_of_words(site: str, words: set[str], finding: str) -> Question:
    return Question(
        f"{site} has {_in_words(words)}, and {finding}, so that categories tell the model where a row is from. Two "
        "codings of one thing? Write the same words in all tables, leave the column out, or name all its categories"
    )


def _in_words(words: set[str]) -> str:
    return listed(sorted(words), 4, repr)


def pooled(columns: Sequence[Column]) -> Column:
    """Return a column of all rows: mean and scale by the numbers of rows, all categories, the widest range."""
    columns_with_rows = [column for column in columns if column.count] or list(columns)
    first_column = columns_with_rows[0]
    kinds = {column.kind for column in columns_with_rows}
    count = sum(column.count for column in columns_with_rows)
    missing = sum(column.missing for column in columns)
    low = min(column.bounds[0] for column in columns_with_rows)
    high = max(column.bounds[1] for column in columns_with_rows)

    words: set[str] = set()
    marks: set[str] = set()
    for column in columns_with_rows:
        words.update(column.categories or ())
        if not isinstance(column.gaps, bool):
            marks.update(column.gaps)
    has_gaps = any(column.gaps for column in columns)

    units = sorted({column.unit for column in columns_with_rows})
    pooled_column = replace(
        first_column,
        unit=units[-1],
        kind=first_column.kind if len(kinds) == 1 else NUMBERS,
        low=_finite(low),
        high=_finite(high),
        other_words=any(column.other_words for column in columns_with_rows),
        gaps=tuple(sorted(marks)) or has_gaps,
        count=count,
        missing=missing,
    )
    if first_column.categories is not None:
        return replace(pooled_column, categories=tuple(sorted(words)))

    num_rows = [max(column.count, 1) for column in columns_with_rows]
    means = [column.mean or 0.0 for column in columns_with_rows]
    deviations = [column.scale or 0.0 for column in columns_with_rows]
    different_moments = {*zip(means, deviations)}
    if len(different_moments) == 1:  # said by hand
        return pooled_column

    # Exact sums do not depend on the order of the sites.
    total_rows = sum(num_rows)
    sums = map(math.prod, zip(num_rows, means))
    mean = math.fsum(sums) / total_rows
    squares = []
    for rows_of_column, mean_of_column, deviation in zip(num_rows, means, deviations):
        variance = deviation**2 + (mean_of_column - mean) ** 2
        squares.append(rows_of_column * variance)
    scale = math.sqrt(math.fsum(squares) / total_rows)
    return replace(
        pooled_column,
        mean=rounded(mean, scale),
        scale=rounded(scale, scale),
    )


def _finite(bound: float) -> float | None:
    return bound if math.isfinite(bound) else None


@dataclass(frozen=True)
class _Difference:
    """Difference of a site's numbers from those elsewhere, of strength 1 where doubts begin."""

    strength: float
    text: str


def _disagreements(
    name: str,
    column_by_site: Mapping[str, Column],
    subject_site: str | None,
    usual_source: str = "elsewhere",
) -> Iterator[TableDoubt]:
    """Compare each site's column with the pooled one of all others, which is that of ``usual_source``."""
    # If one site has another unit, all others differ from it: only the farthest is told.
    farthest: TableDoubt | None = None
    largest_strength = 1.0
    all_columns = list(column_by_site.values())
    usual_column = pooled(all_columns)
    for site, column in column_by_site.items():
        if subject_site not in (None, site) or len(all_columns) < 2:
            continue

        if len(all_columns) <= MAX_SITES_APART:
            other_columns = []
            for other_column in all_columns:
                if other_column is not column:
                    other_columns.append(other_column)
            usual_column = pooled(other_columns)
        num_rows = column.count + column.missing
        num_usual_rows = usual_column.count + usual_column.missing
        if min(num_rows, num_usual_rows) < MIN_COMPARED:
            continue

        share_missing = column.missing / num_rows
        usual_share = usual_column.missing / num_usual_rows
        if share_missing - usual_share > MAX_MISSING_DIFFERENCE:
            text = f"{share_missing:.0%} are missing, {usual_share:.0%} {usual_source}"
            yield TableDoubt(site, name, text)
        words = set(column.categories or ())
        new_words = words.difference(usual_column.categories or ())
        if new_words:
            yield TableDoubt(site, name, f"no other site has {listed(sorted(new_words))}")

        is_comparable = min(column.count, usual_column.count) >= MIN_COMPARED
        if column.categories is None and is_comparable:
            difference = _difference(column, usual_column, usual_source)
            if difference.strength > largest_strength:
                largest_strength = difference.strength
                farthest = TableDoubt(site, name, difference.text)
    if farthest is not None:
        yield farthest


def _difference(column: Column, usual_column: Column, usual_source: str) -> _Difference:
    """Compare a site's numbers with those of ``usual_source`` by bounds, means and deviations."""
    low, high = column.bounds
    usual_low, usual_high = usual_column.bounds
    if high - low == usual_high - usual_low == 1 and low != usual_low:
        codes = f"{low:g} or {high:g}"
        usual_codes = f"{usual_low:g} or {usual_high:g}"
        return _Difference(
            _CERTAIN, f"{codes}, {usual_source} {usual_codes}: two codings of one thing?"
        )

    mean = column.mean or 0.0
    scale = column.scale or 0.0
    usual_mean = usual_column.mean or 0.0
    usual_scale = usual_column.scale or 0.0
    if not scale or not usual_scale:
        strength = _CERTAIN if usual_scale else 0.0
        return _Difference(strength, f"all values are {mean:g}, {usual_source} they differ")

    if mean * usual_mean > 0:
        ratio_of_means = mean / usual_mean
        log_of_means = math.log(ratio_of_means)
        log_of_scales = math.log(scale / usual_scale)
        size = abs(log_of_means + log_of_scales) / 2
        allowed_size = math.log(MAX_RATIO) + 6 / math.sqrt(column.count)  # for skewed values
        if abs(log_of_means - log_of_scales) < math.log(2) and size > allowed_size:
            text = f"values are {ratio_of_means:.3g} times those {usual_source}: another unit?"
            return _Difference(2 * size / allowed_size, text)

    ratio_of_scales = scale / usual_scale
    is_compact = usual_scale < abs(usual_mean) / 2
    if is_compact and ratio_of_scales > MAX_RATIO_OF_DEVIATIONS:
        text = f"deviation {scale:.3g}, {usual_source} {usual_scale:.3g}: some in another unit, or codes?"
        return _Difference(ratio_of_scales / MAX_RATIO_OF_DEVIATIONS, text)

    shift = abs(mean - usual_mean) / max(scale, usual_scale)
    return _Difference(shift / MAX_SHIFT, f"mean {mean:.4g}, {usual_source} {usual_mean:.4g}")


def _with_merged_target(drafts: Mapping[str, Dictionary]) -> Dictionary:
    """Return a dictionary with all classes and no columns."""
    first_site, first_draft = next(iter(drafts.items()))
    read: dict[str, FileFormat] = {}
    for site, dictionary in drafts.items():
        for setting in _SHARED_SETTINGS:
            value = getattr(dictionary, setting)
            first_value = getattr(first_draft, setting)
            if value != first_value:
                raise ConfigurationError(
                    f"The drafts differ in {setting}: {value!r} at {site}, {first_value!r} at {first_site}."
                )
        for name, file_format in dictionary.read.items():
            if read.setdefault(name, file_format) != file_format:
                raise ConfigurationError(
                    f"read: {name!r} is written in two ways. Give the sites' files names of their own."
                )
    merged = replace(first_draft, read=read)
    if first_draft.task == "regression":
        targets = []
        for dictionary in drafts.values():
            (count,) = dictionary.class_counts or (0,)
            target = Column(
                NUMBERS,
                mean=dictionary.target_mean,
                scale=dictionary.target_scale,
                count=max(count, 1),
            )
            targets.append(target)
        return with_target_column(merged, pooled(targets))

    counts = _counts_by_class(drafts)
    class_orders = {dictionary.classes for dictionary in drafts.values()}
    has_order = len(class_orders) == 1 and (merged.positive is not None or len(counts) != 2)
    if has_order:
        classes = tuple(first_draft.classes or ())
    else:
        classes = classes_by_site(counts, merged.target, merged.positive, len(class_orders) > 1)
    totals = counts.sum(axis=1).loc[list(classes)]
    class_counts = [int(total) for total in totals]
    dictionary = replace(
        merged,
        classes=classes,
        class_counts=tuple(class_counts),
    )
    return replace(dictionary, positive=classes[-1]) if len(classes) == 2 else dictionary


def _counts_by_class(drafts: Mapping[str, Dictionary]) -> pd.DataFrame:
    """Return each site's number of rows of each class, indexed by the class."""
    counts_by_site = {}
    for site, dictionary in drafts.items():
        classes = dictionary.classes or ()
        class_counts = dictionary.class_counts or [1] * len(classes)  # deleted before it left
        counts_by_site[site] = pd.Series(class_counts, index=classes, dtype=float)
    return pd.DataFrame(counts_by_site).fillna(0.0)


def classes_by_site(
    counts: pd.DataFrame, target: str, positive: Any, are_compared: bool = True
) -> tuple[str, ...]:
    """Return all classes, the positive one of two last, by each site's number of rows of each class."""
    classes = in_order(list(counts.index))
    if are_compared:
        owners = {name: list(counts.columns[counts.loc[name] > 0]) for name in classes}
        check_spelling(classes, f"the target {target!r}", owners=lambda: owners)
        _check_classes(counts, target)
        if positive is not None and len(classes) > 2:
            classes_of_sites = [f"{name!r} at {listed(owners[name])}" for name in classes]
            raise ConfigurationError(
                f"the target {target!r} is {', '.join(classes_of_sites)}, and pos_label={positive!r} needs two. "
                "Two codings of one thing? Write the same two in all tables, or leave pos_label out."
            )
    return positive_last(classes, positive)


def check_number_of_classes(num_classes: int, num_rows: int, target: str) -> None:
    """Raise ConfigurationError if nearly all rows have a target of their own."""
    if num_classes > max(2, num_rows / 2):
        raise ConfigurationError(
            f"the target {target!r} has {num_classes} different values in {num_rows} rows. Numbers to predict need "
            "task: regression."
        )


def _check_classes(counts: pd.DataFrame, target: str) -> None:
    """Raise ConfigurationError if values are no classes, or a site codes them otherwise.

    ``counts`` has each site's number of rows of each class, indexed by the class.
    """
    num_classes = len(counts)
    num_rows = counts.to_numpy().sum()
    if num_classes < 2:
        raise ConfigurationError(
            f"the target {target!r} has one value in all rows, {counts.index[0]!r}: expected at least 2 classes. If "
            'others have more, name all in the data dictionary: classes: ["no", "yes"].'
        )
    check_number_of_classes(num_classes, int(num_rows), target)
    if len(counts.columns) < 2:
        return
    for site in counts:
        has_class = counts[site] > 0
        other_counts = counts.drop(columns=site)
        is_at_others = (other_counts > 0).any(axis=1)
        if has_class.any() and not (has_class & is_at_others).any():
            classes = listed(counts.index[has_class], 8, repr)
            raise ConfigurationError(
                f"the target {target!r} is {classes} at {site}, and nowhere else. Two codings of one thing? If not, "
                'name all classes in the data dictionary: classes: ["no", "yes"].'
            )


def draft_all(
    tables: Sequence[tuple[Cells, Mapping[str, np.ndarray]]],
    held_out: Sequence[Cells],
    dictionary: Dictionary,
    *,
    is_site: bool = False,
) -> tuple[Dictionary, list[TableDoubt]]:
    """Draft the dictionary of a federation in one process, or the part of one site.

    All cells fit it, also those that are held out, whose rows do not count in means and scales.

    Args:
        tables: each table, and the positions of each client's training rows in it.
        held_out: tables of which no client has rows.
        dictionary: what is known already.
        is_site: whether there is one site, whose draft leaves it and is merged later.
    """
    num_clients = sum(len(rows_by_client) for _, rows_by_client in tables)
    drafts: dict[str, Dictionary] = {}
    untrained_drafts = {}
    for cells, rows_by_client in tables:
        training_rows = np.concatenate([*rows_by_client.values()])
        if is_site or num_clients > MAX_DRAFTS:
            rows_by_client = {cells.name: training_rows}
        untrained_rows = np.setdiff1d(np.arange(len(cells)), training_rows)
        rows_by_name = {
            **rows_by_client,
            _UNTRAINED: untrained_rows,
        }
        drafts_of_table = draft(
            cells,
            dictionary,
            rows_by_site=rows_by_name,
            leaves_site=is_site,
        )
        untrained_drafts[cells.name] = drafts_of_table.pop(_UNTRAINED)
        drafts |= drafts_of_table

    doubts: list[TableDoubt] = []
    if is_site:
        (merged,) = drafts.values()
    else:
        merged, doubts = merge(drafts)

    merged, _ = _widened(merged, untrained_drafts, subject_site=_UNTRAINED)
    for cells in held_out:
        drafts_of_table = draft(cells, dictionary, leaves_site=is_site)
        merged, doubts_beside_clients = _widened(merged, drafts_of_table, subject_site=cells.name)
        doubts += doubts_beside_clients
    return merged, doubts


def _widened(
    merged: Dictionary, drafts: Mapping[str, Dictionary], subject_site: str
) -> tuple[Dictionary, Sequence[TableDoubt]]:
    """Return a dictionary that held-out cells fit, too, and doubts about these."""
    wider, doubts = _merge_columns({_CLIENTS: merged, **drafts}, subject_site)
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
    return replace(merged, columns=columns, excluded=wider.excluded), doubts


def compare(
    dictionary: Dictionary, cells: Cells, site: str
) -> tuple[dict[str, pd.Series], list[TableDoubt]]:
    """Read a site's table by a complete dictionary, and compare both, for the site's own log.

    Returns:
        The columns' values, and doubts.

    Raises:
        ConfigurationError: cells do not fit the dictionary, or it is not clear whether they are its numbers.
    """
    has_codes = {}
    for name, column in dictionary.columns.items():
        cells.check_has(name, "the data dictionary")
        if column.has_numbers:
            try:
                unknown_column = Column(gaps=column.gaps, unit=column.unit)
                has_codes[name] = kind_of(cells, name, unknown_column) == CATEGORIES
            except Question as question:
                raise ConfigurationError(
                    f"{site}: {name}: {question}",
                    without_data=dictionary.without_cells([f"{name!r} ({column.description})"]),
                ) from question

    values = dictionary.values(cells)
    doubts: list[TableDoubt] = []
    for name, column in dictionary.columns.items():
        if has_codes.get(name):  # of numbers alone
            raise ConfigurationError(
                f"{site}: {name} has numbers that begin with a zero or a plus, as codes do, and the data dictionary "
                f"has {column.kind}. Give it categories, or leave it out.",
                without_data=dictionary.without_cells([f"{name!r} ({column.description})"]),
            )
        unlimited_column = replace(column, low=None, high=None, mean=None, scale=None)
        site_column = drafted_column(unlimited_column, values[name])
        usual_column = replace(column, count=column.count or len(cells))  # by hand it has none
        columns = {_DICTIONARY: usual_column, site: site_column}
        # Its numbers are of all sites, with this one.
        doubts += _disagreements(name, columns, subject_site=site, usual_source=f"in {_DICTIONARY}")
    return values, doubts
