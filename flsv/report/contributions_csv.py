"""``contributions.csv``: the run's table as a file, right after a crash and after a resume."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Sequence
from pathlib import Path

from flsv._lightning.durable import append, replacing
from flsv.csv_files import csv_text
from flsv.errors import ConfigurationError
from flsv.report.run_table import SCHEMA, RunTable

_HEADER = csv_text([list(SCHEMA)])


class ContributionsFile:
    """Appends a round at a time, in one write.

    Columns: ``round`` (from 0), ``metric``, ``client``, ``class`` (empty for a client's overall value; where a
    metric's columns are no classes their names, such as the other client's number), ``value``; and once more by name,
    ``client_name`` and ``class_name``; ``low`` and ``high`` of a client's overall value, the ends of its interval
    (see :meth:`flsv.metrics.ContributionMetric.intervals`), empty where none is known. A file of a run that knew no
    names or no intervals yet is gone on with: its rows get the clients' names.

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
            rounds = table.frame["round"]
            lost = rounds[rounds >= first_round].nunique() > 1
        if lost:
            self._set_aside()
        kept = table.before(first_round).named(self._client_names)
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
