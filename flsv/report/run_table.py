"""The table of a run: a row per round, metric, client and class, and the file that it is kept in.

Whatever else a run tells is a view of it.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas

from flsv._lightning.durable import append, replacing
from flsv.csv_files import NAN, Cell, csv_text, number, number_or_nan, read_csv, whole
from flsv.errors import ConfigurationError
from flsv.models.imbalance import OWN_SCORES

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
_TYPES: Mapping[str, Any] = {name: object if kind == "str" else kind for name, kind in SCHEMA.items()}
#: In the order of ``flsv.read_run``.
COLUMNS = ("round", "metric", "client", "client_name", "class", "class_name", "value", "low", "high")
#: Rounds that a file may have where nobody says how many there are.
MOST_ROUNDS = 10**6
#: What the intervals of metrics are of.
MEANING = (
    "90 % of the spread over the run's rounds, or of the estimator's sampling error where that is larger: not of what "
    "another seed, other participants or another validation set would change"
)
#: Metrics that belong to one round: no value stays until the next.
OF_A_ROUND = ("weight", *OWN_SCORES, "update_norm")


@dataclass(frozen=True)
class Numbers:
    """What one metric says after a round.

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


class RunTable:
    """Rows with the columns of :data:`SCHEMA`. Every round makes several tables of few rows: their columns are arrays,
    and a data frame is made where somebody asks for one.

    Args:
        cells: array by the name of the column, texts as objects, as :meth:`of_round` and :meth:`read` make them.

    Example:
        >>> values = [Numbers("sv", [0.5, NAN]), Numbers("weight", [0.75, 0.25])]
        >>> first = RunTable.of_round(0, values, ["Boston", "Lyon"])
        >>> print(first.csv().decode())
        0,sv,0,,0.5,Boston,,,
        0,weight,0,,0.75,Boston,,,
        0,weight,1,,0.25,Lyon,,,
        <BLANKLINE>
        >>> then = RunTable.of_round(1, [Numbers("sv", [0.5, 0.125])], ["Boston", "Lyon"])
        >>> then.changes(first).csv()
        b'1,sv,1,,0.125,Lyon,,,\\n'
    """

    def __init__(self, cells: Mapping[str, np.ndarray]) -> None:
        self.cells = cells

    @classmethod
    def of_round(cls, index: int, numbers: Iterable[Numbers], client_names: Sequence[str]) -> RunTable:
        """The rows of one round: of each metric the overall values, or column by column; none for NaN."""
        cells: dict[str, list[Any]] = {name: [np.empty(0, kind)] for name, kind in _TYPES.items()}
        labels = np.array([*client_names], dtype=object)
        for each in numbers:
            columns = each.columns or {"": ""}
            values = np.asarray(each.values, dtype="float64").reshape(-1, len(columns)).T
            column, place = np.nonzero(~np.isnan(values))
            client = place if each.clients is None else np.asarray(each.clients, dtype="int64")[place]
            ends = np.full((2, values.shape[1]), NAN)
            if each.ends is not None:
                ends[0], ends[1] = each.ends
            ends[:, np.isnan(ends).any(0)] = NAN
            row = {
                "round": np.full(len(place), index),
                "metric": np.full(len(place), each.metric, dtype=object),
                "client": client,
                "class": np.array([*columns], dtype=object)[column],
                "value": values[column, place],
                "client_name": labels[client],
                "class_name": np.array([*columns.values()], dtype=object)[column],
                "low": ends[0, place],
                "high": ends[1, place],
            }
            for name, cell in row.items():
                cells[name].append(cell)
        return cls({name: np.concatenate(parts) for name, parts in cells.items()})

    @classmethod
    def read(cls, path: Path, client_names: Sequence[str], rounds: int | None = None) -> RunTable:
        """All that a run has measured, of its ``contributions.csv``; a last line that a kill cut short is left out.

        Args:
            path: of the file.
            client_names: of the run.
            rounds: of the run; None: nobody knows them.

        Raises:
            ConfigurationError: naming the line, for what no run writes: a client or a round that there is not, another
                name of a client, rounds in another order, a value that is there twice, what is no number.
        """
        names = [" ".join(str(name).split()) for name in client_names]
        rounds = MOST_ROUNDS if rounds is None else rounds
        rows: list[dict[str, Any]] = []
        seen: set[tuple[Any, ...]] = set()
        latest = 0
        for line, row in read_csv(path, _CELLS):
            index, metric, client = row["round"], row["metric"], row["client"]
            key = (index, metric, client, row["class"])
            fault = ""
            if not latest <= index < rounds:
                fault = f"round is {index}, expected {latest} to {rounds - 1}"
            elif client >= len(names):
                fault = f"client is {client}, expected 0 to {len(names) - 1}"
            elif row["client_name"] != names[client]:
                fault = f"client {client} is called {row['client_name']!r}, expected {names[client]!r}"
            elif not metric:
                fault = "there is no metric, expected its name"
            elif key in seen:
                fault = f"{metric} of client {client} in round {index} is there already, expected once"
            if fault:
                raise ConfigurationError(f"{path}, line {line}: {fault}.")
            seen.add(key)
            rows.append(row)
            latest = index
        return cls({name: np.array([row[name] for row in rows], dtype=kind) for name, kind in _TYPES.items()})

    @cached_property
    def frame(self) -> pandas.DataFrame:
        """The rows as a data frame."""
        return pandas.DataFrame(dict(self.cells)).astype(SCHEMA)

    def _rows(self, which: Any) -> RunTable:
        """Those of an index of NumPy's."""
        return RunTable({name: cells[which] for name, cells in self.cells.items()})

    def changes(self, before: RunTable) -> RunTable:
        """The rows whose value or interval is another than ``before``, of one round each."""
        known = {key: row for row, key in enumerate(before._keys())}
        # Who was not there before has the last row, in which nothing is known.
        places = np.array([known.get(key, -1) for key in self._keys()], dtype="int64")
        old = np.append(before._numbers(), np.full((3, 1), NAN), axis=1)[:, places]
        now = self._numbers()
        value, low, high = now != old
        return self._rows(value | (~np.isnan(now[1]) & (low | high)))

    def _keys(self) -> Iterable[tuple[Any, ...]]:
        return zip(*(self.cells[name].tolist() for name in ("metric", "client", "class")))

    def _numbers(self) -> np.ndarray:
        return np.stack([self.cells[name] for name in ("value", "low", "high")])

    def before(self, round_index: int) -> RunTable:
        """The rows of the rounds before this one."""
        return self._rows(self.cells["round"] < round_index)

    def __add__(self, other: RunTable) -> RunTable:
        return RunTable({name: np.concatenate([cells, other.cells[name]]) for name, cells in self.cells.items()})

    def rows(self) -> Iterable[tuple[Any, ...]]:
        """Cells in the order of :data:`SCHEMA`, as Python's own numbers."""
        return zip(*(cells.tolist() for cells in self.cells.values()))

    def csv(self) -> bytes:
        """Lines of ``contributions.csv``, without the header."""
        return csv_text([["" if cell != cell else cell for cell in row] for row in self.rows()])

    def to_frame(self) -> pandas.DataFrame:
        """As :func:`flsv.read_run` gives it."""
        of_class = self.frame["class"] != ""
        texts = {name: self.frame[name].where(of_class, None) for name in ("class", "class_name")}
        return self.frame.assign(**texts)[list(COLUMNS)].reset_index(drop=True)

    @cached_property
    def metrics(self) -> tuple[str, ...]:
        """Names, what diagnostics say among them, in the order of the rows."""
        return tuple(dict.fromkeys(self.cells["metric"].tolist()))

    def columns(self, metric: str) -> tuple[str, ...]:
        """The keys of a metric's columns, those of classes by number; none where it has one value per client."""
        found = tuple(column for name, column in self._places if name == metric and column)
        return tuple(sorted(found, key=int)) if all(column.isdigit() for column in found) else found

    def last(self, metric: str, clients: int, column: str = "", what: str = "value") -> list[float]:
        """``[n]``: each client's last value, or the low or high end of its interval; NaN where there is none."""
        found, part = np.full(clients, NAN), self.part(metric, column).cells
        found[part["client"]] = part[what]
        return found.tolist()

    def history(self, metric: str, clients: int, column: str, rounds: Sequence[int]) -> list[list[float]]:
        """``[r][n]`` of these rounds. A value, once measured, stays until it is measured again; what belongs to one
        round (weights, scores of clients' own models, norms) is NaN in the others."""
        table = self.part(metric, column).frame.pivot(index="round", columns="client", values="value")
        table = table.reindex(index=rounds, columns=range(clients))
        return (table if metric in OF_A_ROUND else table.ffill()).to_numpy().tolist()

    def part(self, metric: str, column: str = "") -> RunTable:
        """The rows of one column of a metric."""
        return self._rows(np.array(self._places.get((metric, column), []), dtype="int64"))

    @cached_property
    def _places(self) -> dict[tuple[str, str], list[int]]:
        found: dict[tuple[str, str], list[int]] = {}
        for row, key in enumerate(zip(self.cells["metric"].tolist(), self.cells["class"].tolist())):
            found.setdefault(key, []).append(row)
        return found


_NUMBERS: Mapping[str, Cell] = {"round": whole, "client": whole, "value": number}
_CELLS: Mapping[str, Cell] = {**dict.fromkeys(SCHEMA, str), **_NUMBERS, "low": number_or_nan, "high": number_or_nan}
_HEADER = csv_text([list(SCHEMA)])


class ContributionsFile:
    """Appends a round at a time, in one write.

    Columns: ``round`` (from 0), ``metric``, ``client``, ``class`` (empty for a client's overall value; where a
    metric's columns are no classes their names, such as the other client's number), ``value``; and once more by name,
    ``client_name`` and ``class_name``; ``low`` and ``high`` of a client's overall value, the ends of its interval
    (see :meth:`flsv.metrics.ContributionMetric.intervals`), empty where none is known.

    Args:
        path: the file.
        client_names: of the clients.

    Example:
        >>> import tempfile
        >>> from flsv.report.run_table import Numbers
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     file = ContributionsFile(Path(folder) / "contributions.csv", ["Boston", "Lyon"])
        ...     _ = file.begin(0)
        ...     file.append(RunTable.of_round(0, [Numbers("cssv", [0.5], clients=[1])], ["Boston", "Lyon"]))
        ...     print(file.path.read_text().splitlines())
        ['round,metric,client,class,value,client_name,class_name,low,high', '0,cssv,1,,0.5,Lyon,,,']
    """

    def __init__(self, path: Path, client_names: Sequence[str]) -> None:
        self.path, self._client_names = path, client_names

    def begin(self, first_round: int, earlier: Path | None = None) -> RunTable:
        """Start writing at ``first_round``: keep the whole rounds before it, drop the rest. A file of another run is
        kept under another name, and so are rounds of this one beyond the first that is run again.

        Args:
            first_round: the next round to be written.
            earlier: the file of the run that is resumed, where that is another one.

        Returns:
            The rounds that are kept.

        Raises:
            ConfigurationError: the file to go on with is none that a run writes, see :meth:`RunTable.read`.
        """
        source = self.path if earlier is None else earlier
        table = RunTable.of_round(0, (), ())
        if first_round > 0:
            if source.is_file():
                table = self._to_go_on_with(source)
            else:
                warnings.warn(f"{source} is gone: {self.path} starts at round {first_round}.", stacklevel=2)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if first_round == 0 or source != self.path:
            lost = self.path.is_file() and self.path.read_bytes() not in (b"", _HEADER)
        else:
            # One round that was written and then lost with the process that ran it is run again alike: it is no loss.
            rounds = table.cells["round"]
            lost = len(np.unique(rounds[rounds >= first_round])) > 1
        if lost:
            self._set_aside()
        kept = table.before(first_round)
        with replacing(self.path) as file:
            file.write(_HEADER + kept.csv())
        return kept

    def append(self, table: RunTable) -> None:
        """Add one round's rows, all or none. Floats are written so that they read back as the same number.

        Raises:
            OSError: they cannot be written; the rounds before stay as they are.
        """
        append(self.path, table.csv())

    def _to_go_on_with(self, source: Path) -> RunTable:
        try:
            return RunTable.read(source, self._client_names)
        except ConfigurationError as error:
            raise ConfigurationError(
                f"{error} Move the file away; the run then goes on with a new one, which begins where it is resumed."
            ) from error

    def _set_aside(self) -> None:
        """Keep a copy of a file whose rounds will not all be written again as they are."""
        stem, suffix = self.path.stem, self.path.suffix
        numbered = (self.path.with_name(f"{stem}_{number}{suffix}") for number in itertools.count(1))
        copy = next(path for path in numbered if not path.exists())
        with replacing(copy) as file:
            file.write(self.path.read_bytes())
        warnings.warn(f"{self.path} holds rounds of an earlier run: they are kept in {copy}.", stacklevel=3)
