"""``contributions.csv``: one tidy row per round, metric, client and class, right after a crash and after a resume."""

from __future__ import annotations

import csv
import io
import itertools
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from flsv._lightning.durable import append, replacing
from flsv.errors import ConfigurationError

HEADER = ("round", "metric", "client", "class", "value", "client_name", "class_name", "low", "high")
#: Before clients had names, and before there were intervals.
_EARLIER_HEADERS = (HEADER[:5], HEADER[:7])
Row = tuple[int, str, int, "int | str", float]
#: Low and high ends, by metric and client.
Intervals = Mapping[tuple[str, int], tuple[float, float]]


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
            ConfigurationError: the file to go on with has other columns.
        """
        source = self.path if earlier is None else earlier
        kept: Sequence[Sequence[str]] = []
        if first_round > 0:
            if source.is_file():
                kept = [row for row in self._complete(source) if int(row[0]) < first_round]
            else:
                warnings.warn(f"{source} is gone: {self.path} starts at round {first_round}.", stacklevel=2)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._set_aside(first_round if source == self.path else 0)
        with replacing(self.path) as file:
            file.write(_lines([HEADER, *kept]))

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
        append(self.path, _lines(lines))

    def values(self) -> Iterator[tuple[str, float]]:
        """Every value written so far, with its metric."""
        for row in _rows(self.path):
            yield row[1], float(row[4])

    def _client(self, client: int) -> str:
        return _line(client if self._client_names is None else self._client_names[client])

    def _class(self, label: int | str) -> str:
        return _line(label if isinstance(label, str) or self._class_names is None else self._class_names[label])

    def _complete(self, source: Path) -> list[list[str]]:
        """The rows of a file to go on with, with names."""
        columns = _columns(source)
        if columns not in (HEADER, *_EARLIER_HEADERS):
            raise ConfigurationError(
                f"{source} has the columns {', '.join(columns)}: expected {', '.join(HEADER)}. Move it away; the run "
                "then goes on with a new file, which begins where it is resumed."
            )
        # Whether a number in "class" was a class or the other client, nobody can tell any more.
        rows = (row if len(row) > 5 else [*row, self._client(int(row[2])), ""] for row in _rows(source))
        return [row if len(row) == len(HEADER) else [*row, "", ""] for row in rows]

    def _set_aside(self, first_round: int) -> None:
        """Keep a copy of a file whose rounds will not all be written again as they are.

        One round that was written and then lost with the process that ran it is run again alike: it is no loss.
        """
        if not self.path.is_file():
            return
        if first_round == 0:
            lost = self.path.read_bytes() not in (b"", _lines([HEADER]))
        else:
            lost = len({row[0] for row in _rows(self.path) if int(row[0]) >= first_round}) > 1
        if lost:
            stem, suffix = self.path.stem, self.path.suffix
            numbered = (self.path.with_name(f"{stem}_{number}{suffix}") for number in itertools.count(1))
            copy = next(path for path in numbered if not path.exists())
            with replacing(copy) as file:
                file.write(self.path.read_bytes())
            warnings.warn(f"{self.path} holds rounds of an earlier run: they are kept in {copy}.", stacklevel=3)


def _lines(rows: Iterable[Sequence[object]]) -> bytes:
    text = io.StringIO(newline="")
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue().encode()


def _line(name: object) -> str:
    # On one line, so that a row that a crash cut short can be told by its missing end.
    return " ".join(str(name).split())


def _columns(path: Path) -> tuple[str, ...]:
    with path.open(newline="") as file:
        return tuple(next(csv.reader(file), ()))


def _rows(path: Path) -> list[list[str]]:
    """The complete rows of the file; a last line that a crash cut short is left out."""
    width = len(_columns(path))
    with path.open(newline="") as file:
        lines = [line for line in file if line.endswith("\n")]
    return [row for row in csv.reader(lines[1:]) if len(row) == width and row[0].isdigit()]
