"""Reading of tables' columns, with one message for all unusable or doubtful columns and options that may repair
them."""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np
from lightning.pytorch.utilities import rank_zero_warn

from flsv.data.groups import check_spelling
from flsv.data.sources.base import ColumnCard
from flsv.data.sources.columns import WORDS, Columns, read_column
from flsv.data.sources.doubts import doubts
from flsv.data.sources.table import Table
from flsv.utilities.errors import ColumnError, ConfigurationError, listed

#: Largest number of problems that a message lists.
_LISTED = 30


def read_columns(table: Table, names: Sequence[str], fit: np.ndarray, columns: Columns) -> list[ColumnCard]:
    """Read the columns of all tables together, so that every table has the same categories.

    Args:
        table: rows of all tables, the training rows first.
        names: names of the columns.
        fit: bool ``[N]``, the training rows, from which categories are taken.
        columns: options of reading.

    Raises:
        ConfigurationError: some columns cannot be used. The message says what is wrong with each column, and suggests
            options.
    """
    cards: list[ColumnCard] = []
    problems: list[ColumnError] = []
    doubted: list[ColumnError] = []
    for name in names:
        try:
            cards.append(_card(table, name, fit, columns))
            doubted += doubts(table, cards[-1], columns)
        except ColumnError as error:
            problems.append(error)
    faults = [*problems, *doubted]
    said = list(dict.fromkeys(map(str, faults)))  # two columns may be counted from the same doubtful dates
    more = [f"and {len(said) - _LISTED} more"] if len(said) > _LISTED + 1 else []
    shown = [*said[: _LISTED if more else None], *more]
    if problems and len(said) > 1:
        shown = [f"{len(said)} problems with the columns:", *(f"  - {each}" for each in shown)]
    options = columns.remedied(faults)
    if options != columns.remedied(()) and not {*names} <= {*options.get("exclude", ())}:
        remedy = "These options may solve them" if problems else "If so, set these options"
        line = json.dumps(options, ensure_ascii=False)
        shown += [f"{remedy} (in Python columns={{...}}):", f"  columns: {line}"]
    if problems:
        raise ConfigurationError("\n".join(shown))
    if said:
        rank_zero_warn("\n".join(shown))
    _warn(table, cards)
    return cards


def _card(table: Table, name: str, fit: np.ndarray, columns: Columns) -> ColumnCard:
    kind, values = read_column(table, name, columns)
    if values[fit].isna().all():
        raise ColumnError(f"{table.path}: no training row has a value of {name!r}.", {"exclude": [name]})
    if kind != WORDS:
        return ColumnCard(name, kind, values)
    known = sorted(values[fit].dropna().unique())
    if len(known) > columns.max_categories:
        raise ColumnError(
            f"{table.path}: {name!r} has {len(known)} different values, more than max_categories="
            f"{columns.max_categories}. Identifiers and free text cannot be features.",
            {"exclude": [name]},
        )
    return ColumnCard(name, kind, values, known)


def _warn(table: Table, cards: Sequence[ColumnCard]) -> None:
    """Warn of categories that occur in no training row, and of categories of one column that differ only in
    spelling."""
    for card in cards:
        if card.categories is None:
            continue
        unseen = sorted({*card.values.dropna().unique()} - {*card.categories})
        if unseen:
            rank_zero_warn(
                f"{table.path}: no training row has {listed(unseen, show=repr)} in {card.name!r}. Validation and test "
                "rows with it are encoded as having none of the categories."
            )
        check_spelling(card.categories, f"{table.path}: {card.name!r}", refuse=False)
