"""``contributions.csv``: one tidy row per round, metric, client and class, right after a crash and after a resume."""

from __future__ import annotations

import csv
import io
import os
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path

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
        """Start writing at ``first_round``: keep the whole rounds before it, drop the rest.

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
        # Written beside it and moved, so that a crash in between loses nothing.
        draft = self.path.with_suffix(".csv.tmp")
        with draft.open("w", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows([HEADER, *kept])
            file.flush()
            os.fsync(file.fileno())
        draft.replace(self.path)

    def append(self, rows: Iterable[Row]) -> None:
        """Add one round's rows. Floats are written so that they read back as the same number."""
        text = io.StringIO(newline="")
        csv.writer(text, lineterminator="\n").writerows(rows)
        with self.path.open("a", newline="") as file:
            file.write(text.getvalue())


def _rows(path: Path) -> list[list[str]]:
    """The complete rows of the file; a last line that a crash cut short is left out."""
    with path.open(newline="") as file:
        lines = [line for line in file if line.endswith("\n")]
    return [row for row in csv.reader(lines[1:]) if len(row) == len(HEADER)]
