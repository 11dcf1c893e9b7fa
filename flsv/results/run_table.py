"""The table of a run, and the CSV file that stores it.

It has one row per round, metric, client and class. All other outputs of a run are views of this table. A client's
value is valid until it is measured again. The file holds a value only for the rounds in which the value
or its interval changes: with 10 of 1,000 clients in a round it gets 10 rows, not 1,000. A number that belongs to one
round, such as a weight or a norm, is valid in that round only. During a run the rows are plain tuples. Readers get a
data frame.
"""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flsv.results.round_result import RoundResult, Row, Sink
from flsv.utilities.atomic_files import append, numbered, replacing
from flsv.utilities.csv_files import (
    Cell,
    csv_text,
    number_or_nan,
    parse_float,
    parse_int,
    read_rows,
)

if TYPE_CHECKING:
    from pandas import DataFrame

#: ``{column: type}``, in the order of the file. ``round`` counts from 0. ``class`` is the number of a class, or the
#: name of another column, as text, and "" for a client's overall value. ``low_over_seeds`` and ``high_over_seeds`` are
#: the ends of an overall value's interval over seeds alone, NaN if it has none. The intervals of a finished run, which
#: include the choice of validation samples where it is known, are those of :func:`flsv.results.preferred_basis`.
SCHEMA = {
    "round": "int64",
    "metric": "str",
    "client": "int64",
    "class": "str",
    "value": "float64",
    "client_name": "str",
    "class_name": "str",
    "low_over_seeds": "float64",
    "high_over_seeds": "float64",
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
    "low_over_seeds",
    "high_over_seeds",
)

#: The columns of estimates, which have a row per client.
ESTIMATE = ["value", "low", "high"]


def frame(rows: Iterable[Iterable[Any]]) -> DataFrame:
    """Return rows as a data frame with the columns of :data:`SCHEMA`."""
    import pandas  # not at the start: it takes most of the time in which flsv is imported

    return pandas.DataFrame(list(rows), columns=[*SCHEMA]).astype(SCHEMA)


def select_rows(
    table: DataFrame,
    metric: str,
    column: str = "",
) -> DataFrame:
    """Select a metric's rows in a run's table, with its overall values, or with one ``column`` such as a class."""
    return table[(table["metric"] == metric) & (table["class"] == column)]


def last_estimates(
    table: DataFrame,
    metric: str,
    num_clients: int,
    column: str = "",
) -> DataFrame:
    """Return each client's last value by a metric or ``column``, with its interval, in the columns :data:`ESTIMATE`."""
    rows = select_rows(table, metric, column).drop_duplicates("client", keep="last")
    estimates = rows.set_index("client")[["value", "low_over_seeds", "high_over_seeds"]]
    return estimates.set_axis(ESTIMATE, axis=1).reindex(range(num_clients))


def tidy(table: DataFrame) -> DataFrame:
    """Return a run's table with the columns of :func:`flsv.read_run`, and None as the class of overall values."""
    is_class_value = table["class"] != ""
    table = table.copy(deep=False)
    for column in ("class", "class_name"):
        table[column] = table[column].where(is_class_value, None)
    return table[list(COLUMNS)].reset_index(drop=True)


_CELLS: Mapping[str, Cell] = {
    **dict.fromkeys(SCHEMA, str),
    "round": parse_int,
    "client": parse_int,
    "value": parse_float,
    "low_over_seeds": number_or_nan,
    "high_over_seeds": number_or_nan,
}
_HEADER = csv_text([list(SCHEMA)])


def read_contributions(path: Path) -> DataFrame:
    """Read a run's table from its ``contributions.csv``, except an incomplete last line."""
    return frame(row.values() for row in read_rows(path, _CELLS))


def _read(path: Path) -> list[Row]:
    table = read_contributions(path)
    return [Row(*row) for row in table.itertuples(index=False, name=None)]


class CSV(Sink):
    """Sink that writes ``contributions.csv``, each round in one write."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def keep_rows_before(
        self,
        first_round: int,
        earlier: Path | None = None,
    ) -> list[Row]:
        """Keep the rows before ``first_round`` of this file, or of the file of an ``earlier`` run, and return them.

        If rounds of another run would be lost, the file is copied first.
        """
        earlier_path = earlier or self.path
        rows = []
        if first_round > 0:
            rows = self._rows_of_earlier_run(earlier_path, first_round)
        self.path.parent.mkdir(parents=True, exist_ok=True)

        continues_own_file = first_round > 0 and earlier_path == self.path
        if continues_own_file:
            # A single later round may be lost: the resumed run repeats the round with the same result.
            later_rounds = {row.round for row in rows if row.round >= first_round}
            loses_rows = len(later_rounds) > 1
        else:
            loses_rows = self._has_rows()  # of another run
        if loses_rows:
            self._keep_earlier_file()

        earlier_rows = [row for row in rows if row.round < first_round]
        self._replace(earlier_rows)
        return earlier_rows

    def _rows_of_earlier_run(self, path: Path, first_round: int) -> list[Row]:
        if path.is_file():
            return _read(path)
        warnings.warn(
            f"{path} no longer exists, so {self.path} starts at round {first_round + 1}.",
            stacklevel=3,
        )
        return []

    def _keep_earlier_file(self) -> None:
        # A copy, because the file must still exist if the new one cannot be written.
        earlier_file = shutil.copyfile(self.path, numbered(self.path))
        warnings.warn(
            f"{self.path} holds rounds of an earlier run: they are kept in {earlier_file}.",
            stacklevel=3,
        )

    def _has_rows(self) -> bool:
        """Return whether the file has anything below its header."""
        return self.path.is_file() and self.path.read_bytes() not in (b"", _HEADER)

    def write_round(self, result: RoundResult) -> None:
        """Append the rows that changed in a round."""
        self.append(result.rows_of_file)

    def write_late_rounds(self, results: Sequence[RoundResult]) -> None:
        """Insert values of earlier rounds, in one write, in place of the values of an earlier process."""
        late_rows = []
        rounds_and_metrics = set()
        for result in results:
            late_rows += result.rows_of_file
            for row in result.table:
                rounds_and_metrics.add((row.round, row.metric))
        if not rounds_and_metrics:
            return

        all_rows = []
        for row in _read(self.path):
            is_replaced = (row.round, row.metric) in rounds_and_metrics
            if not is_replaced:
                all_rows.append(row)
        all_rows += late_rows
        self._replace(sorted(all_rows, key=lambda row: row.round))

    def append(self, rows: Iterable[Row]) -> None:
        """Append one round's rows, all or none. Numbers are written without rounding."""
        append(self.path, csv_text(rows))

    def _replace(self, rows: Iterable[Row]) -> None:
        with replacing(self.path) as file:
            file.write(_HEADER + csv_text(rows))
