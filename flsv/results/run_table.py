"""The table of a run: a row per round, metric, client and class, and the file that it is kept in. While a run goes on
rows are plain tuples; who reads has them as a data frame.

Whatever else a run tells is a view of it. A client's value, once measured, stays until it is measured again. The file
has it in the rounds in which it changes, or its interval does: with 10 of 1,000 clients in a round 10 rows, not 1,000.
What belongs to one round, such as a weight or a norm, is in that round.
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

from flsv.models.imbalance import OWN_SCORES
from flsv.results.round_result import RoundResult, Row, Sink
from flsv.utilities.atomic_files import append, replacing
from flsv.utilities.csv_files import NAN, Cell, csv_text, number_or_nan, parse_float, parse_int, read_rows

#: Column to its type, in the order of the file. ``round`` counts from 0. ``class`` is the number of a class, or the
#: name of another column, as text; "" for a client's overall value. ``low`` and ``high`` are the ends of an overall
#: value's interval, NaN where none is known.
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
#: In the order of ``flsv.read_run``.
COLUMNS = ("round", "metric", "client", "client_name", "class", "class_name", "value", "low", "high")
#: Metrics that belong to one round: no value stays until the next.
OF_A_ROUND = ("weight", *OWN_SCORES, "update_norm")


@dataclass(frozen=True)
class Numbers:
    """The values of one metric after a round.

    Args:
        metric: its name.
        values: ``[n]``, or ``[n, M]`` with columns; NaN where there is none.
        columns: key to name of the M columns.
        ends: low and high ends ``[2, n]`` of ``[n]`` values.
        clients: whose values these are, n of them; None: 0 to n - 1.
    """

    metric: str
    values: Any
    columns: Mapping[str, str] | None = None
    ends: Any = None
    clients: Sequence[int] | None = None


def round_rows(index: int, numbers: Iterable[Numbers], client_names: Sequence[str]) -> list[Row]:
    """Make the rows of one round: of each metric the overall values, or column by column; none for NaN.

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
            for client, value, (low, high) in zip(clients, values[:, place].tolist(), ends.tolist()):
                if value == value:
                    rows.append(Row(index, each.metric, client, column, value, client_names[client], name, low, high))
    return rows


def changes(now: Iterable[Row], before: Iterable[Row]) -> list[Row]:
    """Return the rows whose value or interval differs from ``before``; both are of one round."""
    known = {row[1:4]: row for row in before}
    found = []
    for row in now:
        old = known.get(row[1:4])
        another_interval = old is not None and row.low == row.low and row[7:] != old[7:]
        if old is None or row.value != old.value or another_interval:
            found.append(row)
    return found


def frame(rows: Iterable[Iterable[Any]]) -> DataFrame:
    """Make a data frame of rows, to read from."""
    return DataFrame(list(rows), columns=[*SCHEMA]).astype(SCHEMA)


def part(table: DataFrame, metric: str, column: str = "") -> DataFrame:
    """Return the rows of one column of a metric."""
    return table[(table["metric"] == metric) & (table["class"] == column)]


def columns_in(table: DataFrame, metric: str) -> list[str]:
    """Return the keys of a metric's columns, those of classes by number; none where it has one value per client."""
    found = [column for column in table.loc[table["metric"] == metric, "class"].unique() if column]
    return sorted(found, key=int) if all(column.isdigit() for column in found) else found


def last(table: DataFrame, metric: str, clients: int, column: str = "", what: str = "value") -> list[float]:
    """Return each client's last value ``[n]``, or the low or high end of its interval; NaN where there is none."""
    rows = part(table, metric, column).drop_duplicates("client", keep="last")
    return rows.set_index("client")[what].reindex(range(clients)).tolist()


def history(table: DataFrame, metric: str, clients: int, column: str, rounds: Sequence[int]) -> DataFrame:
    """Return the values ``[r, n]`` of these rounds. A value, once measured, stays until it is measured again; what
    belongs to one round (weights, scores of clients' own models, norms) is NaN in the others."""
    found = part(table, metric, column).pivot(index="round", columns="client", values="value")
    found = found.reindex(index=rounds, columns=range(clients))
    return found if metric in OF_A_ROUND else found.ffill()


def tidy(table: DataFrame) -> DataFrame:
    """Return the table as :func:`flsv.read_run` gives it: None where a row is of no class."""
    texts = {name: table[name].where(table["class"] != "", None) for name in ("class", "class_name")}
    return table.assign(**texts)[list(COLUMNS)].reset_index(drop=True)


def csv_lines(rows: Iterable[Sequence[Any]]) -> bytes:
    """Write rows as lines of ``contributions.csv``, without the header."""
    return csv_text([["" if cell != cell else cell for cell in row] for row in rows])


_CELLS: Mapping[str, Cell] = {
    **dict.fromkeys(SCHEMA, str),
    **{"round": parse_int, "client": parse_int, "value": parse_float, "low": number_or_nan, "high": number_or_nan},
}
_HEADER = csv_text([list(SCHEMA)])


def read_contributions(path: Path) -> DataFrame:
    """Read all that a run has measured from its ``contributions.csv``; a last line that a kill cut short is left out.

    Raises:
        ConfigurationError: naming the line, for what no run writes, such as a value that is no number.
    """
    return frame(row.values() for _, row in read_rows(path, _CELLS))


class CSV(Sink):
    """The sink that writes ``contributions.csv``: a round at a time, in one write.

    Columns: ``round`` (from 0), ``metric``, ``client``, ``class`` (empty for a client's overall value; where a
    metric's columns are no classes their names, such as the other client's number), ``value``; and once more by name,
    ``client_name`` and ``class_name``; ``low`` and ``high`` of a client's overall value, the ends of its interval
    (see :meth:`flsv.metrics.ContributionMetric.intervals`), empty where none is known.

    Args:
        path: the file.
        client_names: names of the clients.
    """

    def __init__(self, path: Path, client_names: Sequence[str]) -> None:
        self.path, self._client_names = path, client_names

    def begin(self, first_round: int, earlier: Path | None = None) -> list[Row]:
        """Start writing at ``first_round``: keep the whole rounds before it, drop the rest. A file of another run is
        kept under another name, and so are rounds of this one beyond the first that is run again.

        Args:
            first_round: the next round to be written.
            earlier: the file of the run that is resumed, where that is another one.

        Returns:
            The rounds that are kept.

        Raises:
            ConfigurationError: the file to go on with is not one that a run writes, see :func:`read_contributions`:
                move it away, and the run goes on with a new one.
        """
        source = self.path if earlier is None else earlier
        rows: list[Row] = []
        if first_round > 0 and source.is_file():
            rows = [Row(*row) for row in read_contributions(source).itertuples(index=False, name=None)]
        elif first_round > 0:
            warnings.warn(f"{source} no longer exists: {self.path} starts at round {first_round + 1}.", stacklevel=2)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if first_round == 0 or source != self.path:
            lost = self.path.is_file() and self.path.read_bytes() not in (b"", _HEADER)
        else:
            # One round that was written and then lost with the process that ran it is run again alike: it is no loss.
            lost = len({row.round for row in rows if row.round >= first_round}) > 1
        if lost:
            self._set_aside()
        kept = [row for row in rows if row.round < first_round]
        with replacing(self.path) as file:
            file.write(_HEADER + csv_lines(kept))
        return kept

    def write(self, result: RoundResult) -> None:
        """Add a round's changes."""
        self.append(result.changes)

    write_late = write

    def append(self, rows: Iterable[Row]) -> None:
        """Add one round's rows, all or none. Floats are written so that they read back as the same number.

        Raises:
            OSError: they cannot be written; the rounds before stay as they are.
        """
        append(self.path, csv_lines(rows))

    def _set_aside(self) -> None:
        """Keep a copy of a file whose rounds will not all be written again as they are."""
        stem, suffix = self.path.stem, self.path.suffix
        numbered = (self.path.with_name(f"{stem}_{number}{suffix}") for number in itertools.count(1))
        copy = next(path for path in numbered if not path.exists())
        with replacing(copy) as file:
            file.write(self.path.read_bytes())
        warnings.warn(f"{self.path} holds rounds of an earlier run: they are kept in {copy}.", stacklevel=3)
