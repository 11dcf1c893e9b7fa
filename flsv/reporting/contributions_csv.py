"""``contributions.csv``: one tidy row per round, metric, client and class, right after a crash and after a resume."""

from __future__ import annotations

import csv
import io
import itertools
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path

from flsv._lightning.durable import append, replacing

HEADER = ("round", "metric", "client", "class", "value")
Row = tuple[int, str, int, "int | str", float]


class ContributionsFile:
    """Appends a round at a time, in one write.

    Columns: ``round`` (from 0), ``metric``, ``client``, ``class`` (empty for a client's overall value; where a
    metric's columns are no classes their names, such as the other client's number), ``value``.

    Args:
        path: the file.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     file = ContributionsFile(Path(folder) / "contributions.csv")
        ...     file.begin(0)
        ...     file.append([(0, "cssv", 1, "", 0.5)])
        ...     print(file.path.read_text().splitlines())
        ['round,metric,client,class,value', '0,cssv,1,,0.5']
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def begin(self, first_round: int, earlier: Path | None = None) -> None:
        """Start writing at ``first_round``: keep the whole rounds before it, drop the rest. A file of another run is
        kept under another name, and so are rounds of this one beyond the first that is run again.

        Args:
            first_round: the next round to be written.
            earlier: the file of the run that is resumed, where that is another one.
        """
        source = self.path if earlier is None else earlier
        kept: Sequence[Sequence[str]] = []
        if first_round > 0:
            if source.is_file():
                kept = [row for row in _rows(source) if int(row[0]) < first_round]
            else:
                warnings.warn(f"{source} is gone: {self.path} starts at round {first_round}.", stacklevel=2)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._set_aside(first_round if source == self.path else 0)
        with replacing(self.path) as file:
            file.write(_lines([HEADER, *kept]))

    def append(self, rows: Iterable[Row]) -> None:
        """Add one round's rows, all or none. Floats are written so that they read back as the same number.

        Raises:
            OSError: they cannot be written; the rounds before stay as they are.
        """
        append(self.path, _lines(rows))

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


def _rows(path: Path) -> list[list[str]]:
    """The complete rows of the file; a last line that a crash cut short is left out."""
    with path.open(newline="") as file:
        lines = [line for line in file if line.endswith("\n")]
    return [row for row in csv.reader(lines[1:]) if len(row) == len(HEADER) and row[0].isdigit()]
