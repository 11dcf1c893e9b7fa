"""Reading of tables' columns, with one message for all unusable or doubtful columns and the options that repair
them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
from lightning.pytorch.utilities import rank_zero_warn

from flsv.data.groups import check_spelling
from flsv.data.sources.base import ColumnCard
from flsv.data.sources.columns import WORDS, Columns, read_column
from flsv.data.sources.doubts import doubtful_dates, doubts, marks_that_are_nowhere, renamed
from flsv.data.sources.table import Table
from flsv.utilities.errors import ColumnError, ConfigurationError, listed

#: Largest number of problems that a message lists.
_LISTED = 30
_Read: TypeAlias = tuple[ColumnCard | None, ColumnError | None, list[ColumnError]]


def read_columns(table: Table, names: Sequence[str], fit: np.ndarray, columns: Columns) -> list[ColumnCard]:
    """Read the columns of all tables together, so that every table has the same categories.

    Args:
        table: rows of all tables, the training rows first.
        names: names of the columns; columns that ``columns`` excludes are not read.
        fit: which rows the categories are taken from, bool ``[N]``.
        columns: options of reading.

    Raises:
        ConfigurationError: some columns cannot be used. The message says what is wrong with each column, and suggests
            options that were tried and work.
    """
    known: dict[Any, _Read] = {}
    cards, problems, doubted = _tried(table, names, fit, columns, known)
    said, options = _remedied(table, names, fit, columns, known, [*problems, *doubted])
    more = [f"and {len(said) - _LISTED} more"] if len(said) > _LISTED + 1 else []
    shown = [*said[: _LISTED if more else None], *more]
    if problems:
        if len(said) > 1:
            shown = [f"{len(said)} problems with the columns:", *(f"  - {each}" for each in shown)]
        way_out = ["These options solve them (in Python columns={...}):", options] if options else []
        raise ConfigurationError("\n".join([*shown, *way_out]))
    if said:
        way_out = ["If so, set these options (in Python columns={...}):", options] if options else []
        rank_zero_warn("\n".join([*shown, *way_out]))
    _warn(table, cards, fit, columns)
    return cards


def _remedied(
    table: Table,
    names: Sequence[str],
    fit: np.ndarray,
    columns: Columns,
    known: dict[Any, _Read],
    faults: list[ColumnError],
) -> tuple[list[str], str]:
    """Follow the errors' and doubts' own suggestions until they suggest nothing more.

    Columns that the suggested options make readable may have another fault, so each suggestion is tried.

    Returns:
        All errors and doubts on the way, and a line with the options after which no error is left; an empty text if
        nothing was suggested, an error is left, or all columns would be excluded.
    """
    said, now, errors = list(map(str, faults)), columns, False
    while (following := Columns(**now.remedied(faults))) != now:
        now = following
        _, problems, doubted = _tried(table, names, fit, now, known)
        faults, errors = [*problems, *doubted], bool(problems)
        said += [each for each in map(str, faults) if each not in said]
    helps = now != columns and not errors and any(name not in (now.exclude or ()) for name in names)
    return said, f"  columns: {json.dumps(now.remedied(()), ensure_ascii=False)}" if helps else ""


def _tried(
    table: Table, names: Sequence[str], fit: np.ndarray, columns: Columns, known: dict[Any, _Read]
) -> tuple[list[ColumnCard], list[ColumnError], list[ColumnError]]:
    """Return a card for each usable column, an error for each unusable column, and a doubt for each doubtful one.

    Args:
        table: the rows of all tables.
        names: names of the columns.
        fit: which rows the categories are taken from.
        columns: options of reading.
        known: what was read before, by the name of a column and the options that concern it; what is read is added.
    """
    names = [name for name in names if name not in (columns.exclude or ())]
    twice = renamed(table, names)
    problems = [each for part in table.parts if columns.encoding is None and (each := part.encoding) is not None]
    problems += [error for _, error in twice]
    left = {name for called, _ in twice for name in called}
    cards: list[ColumnCard] = []
    doubted: list[ColumnError] = []
    for name in names:
        if name in left:
            continue
        key = (name, *map(str, columns.concerning(name, table.typed)))
        if key not in known:
            known[key] = _read(table, name, fit, columns)
        card, problem, doubts_of = known[key]
        cards += [] if card is None else [card]
        problems += [] if problem is None else [problem]
        doubted += doubts_of
    try:
        return cards, problems, [*doubted, *doubtful_dates(table, [card.name for card in cards], columns)]
    except ColumnError as error:  # the column of dates from which days are counted
        return cards, [*problems, error], []


def _read(table: Table, name: str, fit: np.ndarray, columns: Columns) -> _Read:
    """Return a column's card or the reason why it cannot be used, and what is doubtful about it."""
    try:
        card = _card(table, name, fit, columns)
    except ColumnError as error:
        return None, error, []
    return card, None, list(doubts(table, card, columns))


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


def _warn(table: Table, cards: Sequence[ColumnCard], fit: np.ndarray, columns: Columns) -> None:
    """Warn of marks of missing values that no row has, categories without a training row, and similar spellings."""
    for message in marks_that_are_nowhere(table, columns):
        rank_zero_warn(message)
    for card in cards:
        if card.categories is None:
            continue
        unseen = sorted({*card.values.dropna().unique()} - {*card.categories})
        if unseen:
            rank_zero_warn(
                f"{table.path}: no training row has {listed(unseen, show=repr)} in {card.name!r}. Validation and test "
                "rows with it are encoded as having none of the categories."
            )
        values = card.values
        places = {word: table.holding(values == word) for word in card.categories} if table.together else {}
        check_spelling(card.categories, f"{table.path}: {card.name!r}", refuse=False, places=places)
