"""The table of a run, and the CSV file that stores it.

It has one row per round, metric, client and class. All other outputs of a run are views of this table. A client's
value, once measured, is valid until it is measured again. The file holds a value only for the rounds in which the value
or its interval changes: with 10 of 1,000 clients in a round it gets 10 rows, not 1,000. A number that belongs to one
round, such as a weight or a norm, is valid in that round only. During a run the rows are plain tuples. Readers get a
data frame.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from pandas import DataFrame

from flsv.results.round_result import RoundResult, Row, Sink
from flsv.scores.class_scores import OWN_SCORES
from flsv.utilities.atomic_files import append, replacing
from flsv.utilities.csv_files import (
    NAN,
    Cell,
    csv_text,
    number_or_nan,
    parse_float,
    parse_int,
    read_rows,
)

#: ``{column: type}``, in the order of the file. ``round`` counts from 0. ``class`` is the number of a class, or the
#: name of another column, as text, and "" for a client's overall value. ``low`` and ``high`` are the ends of an overall
#: value's interval, NaN if it has none.
SCHEMA = {
    "round": "int64",
    "metric": "str",
    "client": "int64",
    "class": "str",
    "value": "float64",
    "client_name": "str",
    "class_name": "str",
    "low": "float64",
    "high": "float64",
}
#: The columns in the order of ``flsv.read_run``.
COLUMNS = (
    "round",
    "metric",
    "client",
    "client_name",
    "class",
    "class_name",
    "value",
    "low",
    "high",
)
#: Names in the column ``metric`` whose numbers belong to a single round and are not valid in the next.
OF_A_ROUND = ("weight", *OWN_SCORES, "update_norm")


@dataclass(frozen=True)
class Numbers:
    """The values of one metric after a round."""

    #: The metric's name.
    metric: str
    #: `[n]` for n clients, or `[n, M]` with M columns. NaN where a client has no value.
    values: Any
    #: `{key: name}` of the M columns. None if `values` are `[n]`.
    columns: Mapping[str, str] | None = None
    #: `[2, n]`, the low and high ends of the intervals of `[n]` values. None if there are no intervals.
    ends: Any = None
    #: The n clients' ids. None: 0 to n - 1.
    clients: Sequence[int] | None = None


def round_rows(index: int, numbers: Iterable[Numbers], client_names: Sequence[str]) -> list[Row]:
    """Return the rows of one round, one for each value that is not NaN.

    Example:
        >>> table = round_rows(0, [Numbers("sv", [0.5, NAN]), Numbers("weight", [0.75, 0.25])], ["Boston", "Lyon"])
        >>> print(csv_lines(table).decode())
        0,sv,0,,0.5,Boston,,,
        0,weight,0,,0.75,Boston,,,
        0,weight,1,,0.25,Lyon,,,
        <BLANKLINE>
        >>> then = round_rows(1, [Numbers("sv", [0.5, 0.125])], ["Boston", "Lyon"])
        >>> csv_lines(changes(then, table))
        b'1,sv,1,,0.125,Lyon,,,\\n'
    """
    rows = []
    for each in numbers:
        columns = each.columns or {"": ""}
        values = np.asarray(each.values, dtype="float64").reshape(-1, len(columns))
        clients = range(len(values)) if each.clients is None else each.clients
        ends = np.full((len(values), 2), NAN)
        if each.ends is not None:
            ends[:, 0], ends[:, 1] = each.ends
        ends[np.isnan(ends).any(1)] = NAN
        for place, (column, name) in enumerate(columns.items()):
            for client, value, (low, high) in zip(
                clients, values[:, place].tolist(), ends.tolist()
            ):
                if value == value:
                    rows.append(
                        Row(
                            index,
                            each.metric,
                            client,
                            column,
                            value,
                            client_names[client],
                            name,
                            low,
                            high,
                        )
                    )
    return rows


def changes(now: Iterable[Row], before: Iterable[Row]) -> list[Row]:
    """Return the rows of ``now`` that are not in ``before``, or have another value or interval there."""
    known = {row[1:4]: row for row in before}
    found = []
    for row in now:
        old = known.get(row[1:4])
        another_interval = old is not None and row.low == row.low and row[7:] != old[7:]
        if old is None or row.value != old.value or another_interval:
            found.append(row)
    return found


def frame(rows: Iterable[Iterable[Any]]) -> DataFrame:
    """Return rows as a data frame with the columns of :data:`SCHEMA`."""
    return DataFrame(list(rows), columns=[*SCHEMA]).astype(SCHEMA)


def part(table: DataFrame, metric: str, column: str = "") -> DataFrame:
    """Select a metric's rows in a run's table, with its overall values, or with one ``column`` such as a class."""
    return table[(table["metric"] == metric) & (table["class"] == column)]


def columns_in(table: DataFrame, metric: str) -> list[str]:
    """Return the keys of a metric's columns, such as classes, or an empty list if it has none."""
    found = [column for column in table.loc[table["metric"] == metric, "class"].unique() if column]
    return sorted(found, key=int) if all(column.isdigit() for column in found) else found


def last(
    table: DataFrame, metric: str, clients: int, column: str = "", what: str = "value"
) -> list[float]:
    """Return each client's last value of a metric or ``column``, or with ``what`` its interval's low or high end."""
    rows = part(table, metric, column).drop_duplicates("client", keep="last")
    return rows.set_index("client")[what].reindex(range(clients)).tolist()


def with_ends(
    table: DataFrame, metric: str, clients: int
) -> tuple[list[float], list[float], list[float]]:
    """Return each client's last value by a metric, and the low and high ends of its interval."""
    value, low, high = (
        last(table, metric, clients, what=what) for what in ("value", "low", "high")
    )
    return value, low, high


def history(
    table: DataFrame, metric: str, clients: int, column: str, rounds: Sequence[int]
) -> DataFrame:
    """Return a metric's values ``[r, n]`` in r rounds for n clients.

    In a round without a new value the last one is repeated, except for single rounds' numbers (:data:`OF_A_ROUND`).
    """
    found = part(table, metric, column).pivot(index="round", columns="client", values="value")
    found = found.reindex(index=rounds, columns=range(clients))
    return found if metric in OF_A_ROUND else found.ffill()


def tidy(table: DataFrame) -> DataFrame:
    """Return a run's table with the columns of :func:`flsv.read_run`, and None as the class of overall values."""
    texts = {
        name: table[name].where(table["class"] != "", None) for name in ("class", "class_name")
    }
    return table.assign(**texts)[list(COLUMNS)].reset_index(drop=True)


def csv_lines(rows: Iterable[Sequence[Any]]) -> bytes:
    """Encode rows as lines of ``contributions.csv``, without the header."""
    return csv_text([["" if cell != cell else cell for cell in row] for row in rows])


_CELLS: Mapping[str, Cell] = {
    **dict.fromkeys(SCHEMA, str),
    **{
        "round": parse_int,
        "client": parse_int,
        "value": parse_float,
        "low": number_or_nan,
        "high": number_or_nan,
    },
}
_HEADER = csv_text([list(SCHEMA)])
#: The columns that identify a value: no two rows agree in all of them.
_KEY = ["round", "metric", "client", "class"]


def read_contributions(path: Path) -> DataFrame:
    """Read a run's table from its ``contributions.csv``, except an incomplete last line."""
    # Of equal keys, which a resumed run of version 1.1 has written, the last line counts.
    table = frame([*row.values()] for _, row in read_rows(path, _CELLS))
    return table.drop_duplicates(_KEY, keep="last", ignore_index=True)


def _read(path: Path) -> list[Row]:
    return [Row(*row) for row in read_contributions(path).itertuples(index=False, name=None)]


class CSV(Sink):
    """Sink that writes ``contributions.csv``, each round in one write."""

    def __init__(self, path: Path, client_names: Sequence[str]) -> None:
        self.path, self._client_names = path, client_names

    def begin(self, first_round: int, earlier: Path | None = None) -> list[Row]:
        """Keep the rows before ``first_round``, of this file or of an ``earlier`` run's file, and return the rows.

        If this drops rounds of an earlier run, the file is first copied to another name.
        """
        source = self.path if earlier is None else earlier
        rows: list[Row] = []
        if first_round > 0 and source.is_file():
            rows = _read(source)
        elif first_round > 0:
            warnings.warn(
                f"{source} no longer exists: {self.path} starts at round {first_round + 1}.",
                stacklevel=2,
            )
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if first_round == 0 or source != self.path:
            lost = self.path.is_file() and self.path.read_bytes() not in (b"", _HEADER)
        else:
            # A single round that was written before its process was lost is run again with the same result: nothing is
            # lost.
            lost = len({row.round for row in rows if row.round >= first_round}) > 1
        if lost:
            self._set_aside()
        kept = [row for row in rows if row.round < first_round]
        self._replace(kept)
        return kept

    def write(self, result: RoundResult) -> None:
        """Append the rows that changed in a round."""
        self.append(result.changes)

    def write_late(self, results: Sequence[RoundResult]) -> None:
        """Insert values of earlier rounds, in one write, in place of the values of an earlier process."""
        late = [row for result in results for row in result.changes]
        anew = {(row.round, row.metric) for result in results for row in result.table}
        if anew:
            kept = [row for row in _read(self.path) if (row.round, row.metric) not in anew]
            self._replace(sorted([*kept, *late], key=lambda row: row.round))

    def append(self, rows: Iterable[Row]) -> None:
        """Append one round's rows, all or none. Numbers are written without rounding."""
        append(self.path, csv_lines(rows))

    def _replace(self, rows: Iterable[Row]) -> None:
        with replacing(self.path) as file:
            file.write(_HEADER + csv_lines(rows))

    def _set_aside(self) -> None:
        """Copy the file to ``<name>_<number>.csv`` before rounds are dropped from it, and warn."""
        stem, suffix = self.path.stem, self.path.suffix
        numbered = (
            self.path.with_name(f"{stem}_{number}{suffix}") for number in itertools.count(1)
        )
        copy = next(path for path in numbered if not path.exists())
        with replacing(copy) as file:
            file.write(self.path.read_bytes())
        warnings.warn(
            f"{self.path} holds rounds of an earlier run: they are kept in {copy}.", stacklevel=3
        )
