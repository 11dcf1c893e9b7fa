"""Reading of tables' columns, with one message for all unusable or doubtful columns (identifiers, sentinels such as
-999, dates before the date that they are counted from) and options that may repair them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence

import numpy as np
import pandas as pd
from lightning.pytorch.utilities import rank_zero_warn

from flsv.data.groups import check_spelling
from flsv.data.sources.base import ColumnCard
from flsv.data.sources.columns import DAYS, FEW, NUMBERS, WORDS, Columns, dates_of, read_column
from flsv.data.sources.table import Table, by_file, other_words, words_of
from flsv.utilities.errors import ColumnError, ConfigurationError, listed

#: Largest number of problems that a message lists.
_LISTED = 30


def read_columns(table: Table, names: Sequence[str], fit: np.ndarray, columns: Columns) -> list[ColumnCard]:
    """Read the columns of all tables together, so that every table has the same categories."""
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
    for card in cards:
        check_spelling(card.categories or (), f"{table.path}: {card.name!r}", refuse=False)
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


_IDENTIFIER = re.compile(
    r"(?i)(^|[ _.-])(id|nr|no|number|key|index|pid|uid|uuid|mrn|patient|person|case|record)s?$|[a-z]I[Dd]$"
)
#: Share of rows with a number of their own, above which the numbers identify the rows.
MOST = 0.9
#: Largest number of different sentinels among the smallest, and among the largest, numbers of a column.
_CODES = 3


def doubts(table: Table, card: ColumnCard, columns: Columns) -> Iterator[ColumnError]:
    """Yield a ColumnError for each doubt: an identifier, sentinels, words of one table, dates before those they count
    from."""
    if card.categories is None:
        yield from _identifier(table, card, columns)
    elif (message := other_words(table, repr(card.name), card.values)) is not None:
        yield ColumnError(f"{message} Such words tell the model where a row is from. Use the same everywhere.", {})
    if card.kind == NUMBERS:
        yield from sentinels(table, card.name, card.values, card.values, columns)
    dates = columns.dates or {}
    since = dates.get(card.name, DAYS)
    for name in [card.name, *({since} - {DAYS})] if card.name in dates else ():
        days = (dates_of(table, name, columns) - np.datetime64(0, "D")) / np.timedelta64(1, "D")
        yield from sentinels(table, name, days, table.column(name, "dates"), columns)
    if since != DAYS and (before := (card.values < 0).to_numpy()).any() and (card.values > 0).any():
        yield ColumnError(
            f"{table.where(int(before.argmax()))}: {card.name!r} is before {since!r}, as in {before.sum()} rows of "
            f"{table.holding(before)}. Does the day come before the month there? All files need one date_format.",
            {},
        )


def _identifier(table: Table, card: ColumnCard, columns: Columns) -> Iterator[ColumnError]:
    """Yield a ColumnError for a column called like an identifier, with another whole number in almost every row."""
    if card.name in (columns.features or ()) or not _IDENTIFIER.search(card.name):
        return
    held = [pd.Series(values).dropna() for values in by_file(table, card.values)]
    rows, distinct = sum(map(len, held)), sum(values.nunique() for values in held)
    if rows > FEW and distinct > MOST * rows and not (card.values.dropna() % 1).any():
        about = f"{table.path}: {card.name!r} has a different whole number in almost every row"
        yield ColumnError(f"{about}. Identifiers cannot be features: leave it out.", {"exclude": [card.name]})


def sentinels(
    table: Table, name: str, numbers: pd.Series, values: pd.Series, columns: Columns
) -> Iterator[ColumnError]:
    """Yield a ColumnError if some numbers of a column look like sentinels, codes for a missing value."""
    known = columns.gaps or {}
    codes = [] if isinstance(known, dict) and known.get(name) == [] else codes_in(numbers)
    if not codes:
        return
    written = words_of(values).astype(str).str.removesuffix(".0").to_numpy()
    is_code = numbers.isin(codes).to_numpy()
    marks = list(dict.fromkeys(written[is_code]))
    others = numbers.where(~is_code).to_numpy(dtype=float)
    least, most = written[np.nanargmin(others)], written[np.nanargmax(others)]
    yield ColumnError(
        f"{table.holding(is_code)}: {name!r} is {listed(marks)} in {is_code.sum()} rows, and from {least} to {most} in "
        "the others. If it stands for a missing value, name it (gaps).",
        {"gaps": {name: [*known.get(name, ()), *marks]}} if isinstance(known, dict) else {},
    )


def codes_in(numbers: pd.Series) -> list[float]:
    """Return the numbers that look like sentinels: they repeat far from all others, as -999 among ages, or 9 among 1
    and 2."""
    found: list[float] = []
    distinct, times = np.unique(numbers.dropna().to_numpy(dtype=float), return_counts=True)
    counts = pd.Series(times, index=distinct)
    while len(counts) and max(counts.iloc[0], counts.iloc[-1]) > 1:  # sentinels repeat
        ends = [end for count in range(1, _CODES + 1) for end in (counts[:count], counts[-count:])]
        codes = next((end.index.tolist() for end in ends if _are_codes(end, counts.drop(end.index).index)), None)
        if codes is None:
            break
        found += codes
        counts = counts.drop(codes)
    return sorted(found)


def _are_codes(end: pd.Series, rest: pd.Index) -> bool:
    """Return whether the numbers at an ``end``, each repeated, are farther from the others than these spread; nines
    need less."""
    if len(rest) < 2 or end.min() < 2:
        return False
    nines = [word for number in end.index if re.fullmatch(r"-?9+(\.9+)?", word := f"{number:.12g}")]
    gap, width = max(rest[0] - end.index[-1], end.index[0] - rest[-1]), rest[-1] - rest[0]
    if len(rest) <= FEW:
        return bool(nines) and gap > width
    if nines and end.index[-1] < 0 <= rest[0]:
        return True
    return bool(gap > (0.5 if any(len(word) > 1 for word in nines) else 1) * width)
