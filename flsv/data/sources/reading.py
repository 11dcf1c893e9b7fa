"""Reading of tables' columns, with one message for all unusable or doubtful columns and the options that repair
them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

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


@dataclass(frozen=True)
class _Found:
    """Result of reading columns.

    Args:
        cards: the cards of the usable columns.
        problems: the errors of the columns that cannot be used.
        doubted: errors, not raised, about usable columns that look wrong.
    """

    cards: list[ColumnCard]
    problems: list[ColumnError]
    doubted: list[ColumnError]


def read_columns(table: Table, names: Sequence[str], fit: np.ndarray, columns: Columns) -> list[ColumnCard]:
    """Read the columns of all tables together, so that every table has the same categories.

    Args:
        table: rows of all tables, the training rows first.
        names: names of the columns; columns that ``columns`` excludes are not read.
        fit: bool ``[N]``, the training rows, from which categories are taken.
        columns: options of reading.

    Raises:
        ConfigurationError: some columns cannot be used. The message says what is wrong with each column, and suggests
            options that were tried and work.
    """
    reader = _Reader(table, names, fit)
    found = reader.read(columns)
    said, options = reader.remedied(columns, found)
    more = [f"and {len(said) - _LISTED} more"] if len(said) > _LISTED + 1 else []
    shown = [*said[: _LISTED if more else None], *more]
    if found.problems and len(said) > 1:
        shown = [f"{len(said)} problems with the columns:", *(f"  - {each}" for each in shown)]
    if options:
        remedy = "These options solve them" if found.problems else "If so, set these options"
        shown += [f"{remedy} (in Python columns={{...}}):", options]
    if found.problems:
        raise ConfigurationError("\n".join(shown))
    if said:
        rank_zero_warn("\n".join(shown))
    _warn(table, found.cards, fit, columns)
    return found.cards


class _Reader:
    """Reader of a table's columns that tries several sets of options; no column is read twice with the same options.

    Args:
        table: rows of all tables.
        names: names of the columns.
        fit: bool ``[N]``, the training rows, from which categories are taken.
    """

    def __init__(self, table: Table, names: Sequence[str], fit: np.ndarray) -> None:
        self._table, self._names, self._fit = table, names, fit
        self._known: dict[tuple[str, ...], _Found] = {}

    def read(self, columns: Columns) -> _Found:
        """Read all columns that ``columns`` does not exclude, with these options."""
        table, names = self._table, [name for name in self._names if name not in (columns.exclude or ())]
        twice = renamed(table, names)
        found = _Found([], [error for _, error in twice], [])
        if columns.encoding is None:
            found.problems[:0] = [part.encoding for part in table.parts if part.encoding is not None]
        left_out = {name for called, _ in twice for name in called}
        for name in names:
            if name not in left_out:
                column = self._read(name, columns)
                found.cards.extend(column.cards)
                found.problems.extend(column.problems)
                found.doubted.extend(column.doubted)
        try:
            found.doubted.extend(doubtful_dates(table, [card.name for card in found.cards], columns))
        except ColumnError as error:  # the column of dates from which days are counted
            return _Found(found.cards, [*found.problems, error], [])
        return found

    def _read(self, name: str, columns: Columns) -> _Found:
        key = (name, *map(str, columns.concerning(name, self._table.typed)))
        if key in self._known:
            return self._known[key]
        try:
            card = _card(self._table, name, self._fit, columns)
        except ColumnError as error:
            self._known[key] = _Found([], [error], [])
        else:
            self._known[key] = _Found([card], [], list(doubts(self._table, card, columns)))
        return self._known[key]

    def remedied(self, columns: Columns, found: _Found) -> tuple[list[str], str]:
        """Apply the options that errors and doubts suggest, and read again, until nothing new is suggested.

        A column that has become readable may have another fault, so the columns are read after each suggestion.

        Args:
            columns: the user's options.
            found: the result of reading with them.

        Returns:
            The texts of all errors and doubts that have occurred, and a line with the final options to paste. The line
            is empty if nothing was suggested, an error is left, or all columns would be excluded.
        """
        now, faults = columns, [*found.problems, *found.doubted]
        said = list(map(str, faults))
        while (following := Columns(**now.remedied(faults))) != now:
            now, found = following, self.read(following)
            faults = [*found.problems, *found.doubted]
            said += [each for each in map(str, faults) if each not in said]
        helps = now != columns and not found.problems and any(name not in (now.exclude or ()) for name in self._names)
        return said, f"  columns: {json.dumps(now.remedied(()), ensure_ascii=False)}" if helps else ""


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
    """Warn of marks of missing values (``columns.gaps``) that occur in no row, of categories that occur in no training
    row, and of categories of one column that differ only in spelling."""
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
