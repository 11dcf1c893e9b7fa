"""``contributions.csv``: one tidy row per round, metric, client and class, right after a crash and after a resume."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from pathlib import Path

from flsv._lightning.durable import append, replacing
from flsv.csv_files import NAN, Cell, csv_text, number, number_or_nan, read_csv, save_csv, whole
from flsv.errors import ConfigurationError

HEADER = ("round", "metric", "client", "class", "value", "client_name", "class_name", "low", "high")
#: Clients that a file may have where nobody says how many there are, and rounds.
MOST_CLIENTS, MOST_ROUNDS = 10**5, 10**6
Row = tuple[int, str, int, "int | str", float]
#: Low and high ends, by metric and client.
Intervals = Mapping[tuple[str, int], tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Measurement:
    """One line, in the order of the columns. ``column`` is the class's number, the column's name, or ``""``; ``low``
    and ``high`` are NaN where no interval is known."""

    round: int
    metric: str
    client: int
    column: str
    value: float
    client_name: str = ""
    class_name: str = ""
    low: float = NAN
    high: float = NAN


def read_measurements(
    path: Path, client_names: Sequence[str] | None = None, rounds: int | None = None
) -> list[Measurement]:
    """All that a run has measured; a last line that a kill cut short is left out.

    Args:
        path: of ``contributions.csv``; files of earlier versions have no names or no intervals.
        client_names: of the run; None: nobody knows them.
        rounds: of the run, likewise.

    Raises:
        ConfigurationError: naming the line, for what no run writes: a client or a round that there is not, another name
            of a client, rounds in another order, a value that is there twice, what is no number.
    """
    clients = MOST_CLIENTS if client_names is None else len(client_names)
    names = None if client_names is None else [" ".join(str(name).split()) for name in client_names]
    rounds = MOST_ROUNDS if rounds is None else rounds
    found: dict[tuple[int, str, int, str], Measurement] = {}
    latest = 0
    for line, cells in read_csv(path, _NEEDED, _OTHERS):
        row = Measurement(**{_FIELDS.get(name, name): cells[name] for name in HEADER if name in cells})
        key = (row.round, row.metric, row.client, row.column)
        fault = ""
        if not latest <= row.round < rounds:
            fault = f"round is {row.round}, expected {latest} to {rounds - 1}"
        elif row.client >= clients:
            fault = f"client is {row.client}, expected 0 to {clients - 1}"
        elif names and row.client_name and row.client_name != names[row.client]:
            fault = f"client {row.client} is called {row.client_name!r}, expected {names[row.client]!r}"
        elif not row.metric:
            fault = "there is no metric, expected its name"
        elif key in found:
            fault = f"{row.metric} of client {row.client} in round {row.round} is there already, expected once"
        if fault:
            raise ConfigurationError(f"{path}, line {line}: {fault}.")
        found[key], latest = row, row.round
    return list(found.values())


_NEEDED: Mapping[str, Cell] = {"round": whole, "metric": str, "client": whole, "class": str, "value": number}
_OTHERS: Mapping[str, Cell] = {"low": number_or_nan, "high": number_or_nan}
_FIELDS = {"class": "column"}


class ContributionsFile:
    """Appends a round at a time, in one write.

    Columns: ``round`` (from 0), ``metric``, ``client``, ``class`` (empty for a client's overall value; where a
    metric's columns are no classes their names, such as the other client's number), ``value``; and once more by name,
    ``client_name`` and ``class_name``; ``low`` and ``high`` of a client's overall value, the ends of its interval
    (see :meth:`flsv.metrics.ContributionMetric.intervals`), empty where none is known. A file of a run that knew no
    names or no intervals yet is gone on with: its rows get the clients' names.

    Args:
        path: the file.
        client_names: of the clients; their numbers by default.
        class_names: of the classes, likewise.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     file = ContributionsFile(Path(folder) / "contributions.csv")
        ...     file.begin(0)
        ...     file.append([(0, "cssv", 1, "", 0.5)])
        ...     print(file.path.read_text().splitlines())
        ['round,metric,client,class,value,client_name,class_name,low,high', '0,cssv,1,,0.5,1,,,']
    """

    def __init__(
        self, path: Path, client_names: Sequence[str] | None = None, class_names: Sequence[str] | None = None
    ) -> None:
        self.path = path
        self._client_names, self._class_names = client_names, class_names

    def begin(self, first_round: int, earlier: Path | None = None) -> None:
        """Start writing at ``first_round``: keep the whole rounds before it, drop the rest. A file of another run is
        kept under another name, and so are rounds of this one beyond the first that is run again.

        Args:
            first_round: the next round to be written.
            earlier: the file of the run that is resumed, where that is another one.

        Raises:
            ConfigurationError: the file to go on with is none that a run writes, see :func:`read_measurements`.
        """
        source = self.path if earlier is None else earlier
        rows: Sequence[Measurement] = []
        if first_round > 0:
            if source.is_file():
                rows = self._to_go_on_with(source)
            else:
                warnings.warn(f"{source} is gone: {self.path} starts at round {first_round}.", stacklevel=2)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if first_round == 0 or source != self.path:
            lost = self.path.is_file() and self.path.read_bytes() not in (b"", csv_text([HEADER]))
        else:
            # One round that was written and then lost with the process that ran it is run again alike: it is no loss.
            lost = len({row.round for row in rows if row.round >= first_round}) > 1
        if lost:
            self._set_aside()
        save_csv(self.path, [HEADER, *(self._cells(row) for row in rows if row.round < first_round)])

    def append(
        self, rows: Iterable[Row], intervals: Mapping[tuple[str, int], tuple[float, float]] | None = None
    ) -> None:
        """Add one round's rows, all or none. Floats are written so that they read back as the same number.

        Args:
            rows: of the round.
            intervals: low and high ends of overall values, by metric and client.

        Raises:
            OSError: they cannot be written; the rounds before stay as they are.
        """
        known = intervals or {}
        lines = []
        for row in rows:
            ends = known.get((row[1], row[2]), ("", "")) if row[3] == "" else ("", "")
            lines.append((*row, self._client(row[2]), self._class(row[3]), *ends))
        append(self.path, csv_text(lines))

    def values(self) -> Iterator[tuple[str, float]]:
        """Every value written so far, with its metric."""
        return ((row.metric, row.value) for row in read_measurements(self.path, self._client_names))

    def _client(self, client: int) -> str:
        return str(client if self._client_names is None else self._client_names[client])

    def _class(self, label: int | str) -> str:
        return str(label if isinstance(label, str) or self._class_names is None else self._class_names[label])

    def _to_go_on_with(self, source: Path) -> list[Measurement]:
        try:
            return read_measurements(source, self._client_names)
        except ConfigurationError as error:
            raise ConfigurationError(
                f"{error} Move the file away; the run then goes on with a new one, which begins where it is resumed."
            ) from error

    def _cells(self, row: Measurement) -> list[object]:
        """In the order of the columns. Whether a number in "class" was a class or the other client, nobody can tell in
        a file without names."""
        cells = astuple(replace(row, client_name=row.client_name or self._client(row.client)))
        return ["" if cell != cell else cell for cell in cells]

    def _set_aside(self) -> None:
        """Keep a copy of a file whose rounds will not all be written again as they are."""
        stem, suffix = self.path.stem, self.path.suffix
        numbered = (self.path.with_name(f"{stem}_{number}{suffix}") for number in itertools.count(1))
        copy = next(path for path in numbered if not path.exists())
        with replacing(copy) as file:
            file.write(self.path.read_bytes())
        warnings.warn(f"{self.path} holds rounds of an earlier run: they are kept in {copy}.", stacklevel=3)
