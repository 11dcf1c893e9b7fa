"""CSV files of results that take long to compute. Each result is written when it is known."""
# A killed process loses only the result that it was computing. If all rows belong to one experiment, the first line
# holds its settings, and results of other settings are refused.

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from flsv.utilities.atomic_files import append, replacing, whole_lines
from flsv.utilities.csv_files import Cell, csv_text, read_rows
from flsv.utilities.errors import ConfigurationError


class ResultFile:
    """CSV file of results to which rows are appended.

    The first line stores the ``settings``. A file of other settings or columns is an error. A row that a kill has cut
    off is dropped.
    """

    def __init__(
        self,
        path: Path,
        columns: Mapping[str, Cell],
        settings: Mapping[str, str] | None = None,
    ) -> None:
        self.path = path
        self.rows: list[dict[str, Any]] = []
        self._head = csv_text([list(columns)])
        if settings is not None:
            self._head = f"# {json.dumps(settings)}\n".encode() + self._head
        #: Whether the file exists and holds :attr:`rows`. If not, the first row creates it.
        self._is_begun = False

        head = self._head.decode().splitlines()
        lines = whole_lines(path) if path.is_file() else []
        for line, expected in zip(lines, head):
            if line != expected:
                raise ConfigurationError(
                    f"{path} holds results of other settings: it has {line}, expected {expected}. Go on with those, "
                    "move the file away, or name another folder."
                )
        if len(lines) < len(head):
            return
        self.rows = [*read_rows(path, columns, skip=len(head) - 1)]
        self._is_begun = True
        content = path.read_bytes()
        end_of_rows = content.rindex(b"\n") + 1
        if end_of_rows < len(content):
            with replacing(path) as file:
                file.write(content[:end_of_rows])

    def add(self, rows: Iterable[Sequence[object]]) -> None:
        """Append the rows, all or none."""
        if self._is_begun:
            append(self.path, csv_text(rows))
        else:
            self.replace(rows)

    def replace(self, rows: Iterable[Sequence[object]]) -> None:
        """Replace the file's contents with these rows."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(self.path) as file:
            file.write(self._head + csv_text(rows))
        self._is_begun = True
