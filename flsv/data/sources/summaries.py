"""What clients tell about their tables, and how the encoder that all use is made of it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import compress
from types import MappingProxyType

import numpy as np

from flsv.data.groups import check_spelling
from flsv.data.labels import in_order, positive_last
from flsv.data.sources.agreed import (
    WORDS_KIND,
    AgreedEncoder,
    ColumnCode,
    ColumnSummary,
    Moments,
    TableSummary,
)
from flsv.data.sources.columns import ColumnCard, Columns, raise_problems
from flsv.data.sources.frames import without_point_zero
from flsv.data.sources.notation import TWO_WRITINGS, parse_numbers
from flsv.utilities.errors import ColumnError, ConfigurationError, listed

#: Numbers whose deviation is at most this share of their mean are taken to be constant.
ROUNDING = 1e-12
#: How many numbers :class:`Moments` have.
NUM_OF_SUMS = 3


def summarize_column(card: ColumnCard, rows: np.ndarray, min_rows: int) -> ColumnSummary:
    """Return what a client tells about a column, ``rows`` being the positions of its training rows."""
    values = card.values.iloc[rows]
    num_missing = int(values.isna().sum())
    num_hidden = 0
    if num_missing < min_rows:  # a number of few rows is not told
        num_hidden = num_missing
        num_missing = 0
    is_empty = card.values.isna().all()

    moments = None
    categories = None
    values = values.dropna()
    if card.kind == WORDS_KIND:
        categories = count_frequent(values, min_rows, num_hidden=num_hidden)
    else:
        numbers = values.to_numpy(dtype=np.float64)
        moments = moments_of_enough(numbers, min_rows, num_hidden=num_hidden)
    return ColumnSummary(
        kind="" if is_empty else card.kind,
        missing=num_missing,
        moments=moments,
        categories=categories,
    )


def moments_of_enough(numbers: np.ndarray, min_rows: int, num_hidden: int = 0) -> Moments:
    """Return the moments of numbers, or those of none if they tell of fewer than ``min_rows`` rows."""
    # `num_hidden` rows have no number, which is not told. Some numbers are left out with them.
    num_told = len(numbers) - _padding(num_hidden, min_rows)
    if num_told < min_rows:
        return Moments()
    numbers_told = numbers[:num_told]
    # Number, sum and sum of squares would tell how many rows have each of up to three values.
    values, counts = np.unique(numbers_told, return_counts=True)
    if len(values) <= NUM_OF_SUMS and counts.min() < min_rows:
        return Moments()
    return Moments.of(numbers_told)


def count_frequent(words: Iterable[str], min_rows: int, num_hidden: int = 0) -> dict[str, int]:
    """Count words, sorted, and leave out those that occur fewer than ``min_rows`` times."""
    # `num_hidden` rows have no word, which is not told. One count is lowered for the rows hidden beside them, or if
    # none is large enough, no word is told.
    counts = {}
    for word, count in sorted(Counter(words).items()):
        if count >= min_rows:
            counts[word] = count
        else:
            num_hidden += count

    padding = _padding(num_hidden, min_rows)
    if padding == 0:
        return counts
    for word, count in counts.items():
        if count - padding >= min_rows:
            return counts | {word: count - padding}
    return {}


def _padding(num_hidden: int, min_rows: int) -> int:
    """Return how many rows are hidden beside ``num_hidden``, so that their number is a multiple of ``min_rows - 1``."""
    # All rows are counted elsewhere, so that what is not told could be computed from what is. With these rows one
    # hidden value may have any number of rows below `min_rows`.
    return -num_hidden % max(min_rows - 1, 1)


def _sum_of_moments(moments_by_client: Iterable[Moments | None]) -> Moments:
    total = Moments()
    for moments in moments_by_client:
        if moments is not None:
            total = total + moments
    return total


def encoder_of_sites(summaries: Mapping[str, TableSummary]) -> AgreedEncoder:
    """Make the encoder of sites' summaries, ``{site: summary}``, which hold the options by which tables are read.

    Raises:
        ConfigurationError: the tables do not fit together, or sites read them by other options. The message names the
            sites and what to do.
    """
    settings = {site: summary.settings for site, summary in summaries.items()}
    first_site = next(iter(settings))
    agreed_settings = settings[first_site]
    for site, settings_of_site in settings.items():
        if settings_of_site != agreed_settings:
            raise ConfigurationError(
                f"{site} reads its table by {settings_of_site!s:.600}, and {first_site} by "
                f"{agreed_settings!s:.600}. Give all sites the same labels, pos_label and columns."
            )
    columns = Columns(**agreed_settings["columns"])
    target = agreed_settings["target"]

    counts = {}
    for site, summary in summaries.items():
        counts[site] = summary.classes or {}
    classes = agreed_classes(
        counts,
        columns,
        target=target,
        pos_label=agreed_settings["pos_label"],
        where="the sites' tables",
    )
    names: dict[str, None] = {}
    for summary in summaries.values():
        names |= dict.fromkeys(summary.columns)
    return agreed_encoder(
        summaries, columns, target=target, classes=classes, names=names, where="the sites' tables"
    )


def agreed_encoder(
    summaries: Mapping[str, TableSummary],
    columns: Columns,
    target: str,
    classes: tuple[str, ...] | None,
    names: Iterable[str],
    where: str,
    unreadable: Mapping[str, ColumnError] = MappingProxyType({}),
) -> AgreedEncoder:
    """Make the encoder of clients' summaries, ``{client: summary}``.

    ``names`` are those of the features' columns, of which some are ``unreadable``.

    Raises:
        ConfigurationError: the tables do not fit together. The message names the clients and options that may help.
    """
    codes: list[ColumnCode] = []
    problems: list[ColumnError] = []
    for name in names:
        if name in unreadable:
            problems.append(unreadable[name])
            continue
        try:
            codes.append(_code(name, summaries, columns, where))
        except ColumnError as error:
            problems.append(error)
    raise_problems(problems, columns)

    target_mean = 0.0
    target_scale = 1.0
    if columns.standardize_target:
        moments = _sum_of_moments(summary.target for summary in summaries.values())
        is_constant = not moments.count or moments.deviation <= ROUNDING * abs(moments.mean)
        if is_constant:
            raise ConfigurationError(
                f"{where}: all training rows have the same {target!r} (labels)."
            )
        target_mean = moments.mean
        target_scale = moments.deviation
    return AgreedEncoder(tuple(codes), classes, target_mean, target_scale)


def _code(
    name: str, summaries: Mapping[str, TableSummary], columns: Columns, where: str
) -> ColumnCode:
    parts = {}
    clients_without = []
    for client, summary in summaries.items():
        if name in summary.columns:
            parts[client] = summary.columns[name]
        else:
            clients_without.append(client)
    if clients_without:
        raise ColumnError(
            f"{listed(clients_without)}: no column {name!r}, which others have.",
            {"exclude": [name]},
        )
    kind = _common_kind(name, parts)
    has_gaps = any(part.missing for part in parts.values())
    if kind == WORDS_KIND:
        categories = _common_categories(name, parts, columns, where)
        return ColumnCode(name, kind, categories=tuple(categories), gaps=has_gaps)

    moments = _sum_of_moments(part.moments for part in parts.values())
    if not moments.count:
        raise ColumnError(
            f"{where}: no training row has a value of {name!r}{_of_enough_rows(columns)}.",
            {"exclude": [name]},
        )
    return ColumnCode(name, kind, mean=moments.mean, scale=moments.scale, gaps=has_gaps)


def _common_kind(name: str, parts: Mapping[str, ColumnSummary]) -> str:
    clients_by_kind: dict[str, list[str]] = {}
    for client, part in parts.items():
        if part.kind:
            clients_by_kind.setdefault(part.kind, []).append(client)
    if len(clients_by_kind) > 1:
        descriptions = []
        for kind in sorted(clients_by_kind):
            descriptions.append(f"{kind} at {listed(clients_by_kind[kind])}")
        sentence = f"{name!r} has {' and '.join(descriptions)}"
        if WORDS_KIND in clients_by_kind:
            sentence += f": {TWO_WRITINGS}"
        raise ColumnError(sentence, {"exclude": [name]})
    return next(iter(clients_by_kind), "")


def _common_categories(
    name: str, parts: Mapping[str, ColumnSummary], columns: Columns, where: str
) -> list[str]:
    clients_by_word: dict[str, list[str]] = {}
    for client, part in parts.items():
        for word in part.categories or ():
            clients_by_word.setdefault(word, []).append(client)
    if not clients_by_word:
        raise ColumnError(
            f"{where}: no training row has a value of {name!r}{_of_enough_rows(columns)}.",
            {"exclude": [name]},
        )
    words = list(clients_by_word)
    is_number = np.isfinite(parse_numbers(words))
    texts = list(compress(words, ~is_number))
    try:
        check_spelling(texts, f"{where}: {name!r}", owners=lambda: clients_by_word)
    except ConfigurationError as error:
        raise ColumnError(str(error), {"exclude": [name]}) from error
    if len(clients_by_word) > columns.max_categories:
        raise ColumnError(
            f"{where}: {name!r} has {len(clients_by_word)} different values, more than "
            f"max_categories={columns.max_categories}. Identifiers and free text cannot be features.",
            {"exclude": [name]},
        )
    return sorted(clients_by_word)


def _of_enough_rows(columns: Columns) -> str:
    if columns.min_rows == 1:
        return ""
    return f" that {columns.min_rows} rows of a client have (min_rows)"


def agreed_classes(
    counts_by_part: Mapping[str, Mapping[str, int]],
    columns: Columns,
    target: str,
    pos_label: object,
    where: str,
    places: Callable[[], Mapping[str, Sequence[str]]] | None = None,
) -> tuple[str, ...] | None:
    """Return the class names, the positive one of two last, or None for regression.

    ``counts_by_part`` has the number of rows of each class in each table, ``places`` returns the lines with each class.
    """
    if columns.task != "classification":
        return None
    counts: Counter[str] = Counter()  # rows of each class in all tables
    parts_of_class: dict[str, list[str]] = {}
    for part, counts_of_part in counts_by_part.items():
        counts.update(counts_of_part)
        for label in counts_of_part:
            parts_of_class.setdefault(label, []).append(part)

    if columns.classes is None:
        names = in_order(list(counts))
        column_name = f"target {target!r}"
        _check_number_of_classes(names, counts.total(), f"{where}: {column_name}", columns)
        # Messages name the lines with each spelling, or else the tables.
        check_spelling(names, f"{where}: {column_name}", owners=places or parts_of_class.copy)
        _check_tables_share_labels(counts_by_part, names, column_name)
    else:
        names = in_order(without_point_zero(columns.classes))
    counts_in_order = [counts[name] for name in names]
    return positive_last(names, counts_in_order, pos_label)


def _check_number_of_classes(
    class_names: Sequence[str], num_rows: int, column_name: str, columns: Columns
) -> None:
    max_classes = max(2, num_rows // 2)
    if not 2 <= len(class_names) <= max_classes:
        raise ConfigurationError(
            f"{column_name} has {len(class_names)} different values{_of_enough_rows(columns)} in {num_rows} rows, "
            "which cannot be classes. Name another column; to predict a number, set task: "
            "regression in columns."
        )


def _check_tables_share_labels(
    counts_by_part: Mapping[str, Mapping[str, int]], names: Sequence[str], column_name: str
) -> None:
    labels_by_part = {part: set(counts) for part, counts in counts_by_part.items()}
    # Tables are joined to a group by the labels that they share.
    joined_labels = _labels_of_joined_tables(list(labels_by_part.values()))
    separate_parts = []
    for part, labels in labels_by_part.items():
        if not labels <= joined_labels:
            separate_parts.append(part)
    if separate_parts:
        raise ConfigurationError(
            f"{listed(separate_parts)}: {column_name} has no label of {listed(sorted(joined_labels), 8, repr)}, "
            "which the other tables have. Write the classes the same way everywhere. If all "
            f'these are classes, name them: columns: {{"classes": {json.dumps(names)}}}.'
        )


def _labels_of_joined_tables(labels_by_table: Sequence[set[str]]) -> set[str]:
    """Return the labels of the first table that has some, and of all tables that share a label with these."""
    # Start with a table that has labels, and join those that share one with it.
    joined_labels = next(filter(None, labels_by_table), set())
    previous_size = 0
    while len(joined_labels) > previous_size:  # until no further table is joined
        previous_size = len(joined_labels)
        for labels in labels_by_table:
            if joined_labels & labels:
                joined_labels = joined_labels | labels
    return joined_labels
