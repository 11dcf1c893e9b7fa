"""CSV files of results that take long to compute. Each result is written when it is known."""
# A killed process loses only the result that it was computing. If all rows belong to one experiment, the first line
# holds its settings, and results of other settings are refused.

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from flsv.utilities.atomic_files import append, replacing, whole_lines
from flsv.utilities.csv_files import Cell, csv_text, parse_int, read_rows
from flsv.utilities.errors import ConfigurationError, listed


class ResultFile:
    """CSV file of results to which rows are appended.

    The first line stores the ``settings``. A file of other settings is an error, or with ``anew`` overwritten. If the
    process was killed while writing, the last result is dropped: all rows that agree with the last row in the first
    ``key`` columns.
    """

    def __init__(
        self,
        path: Path,
        columns: Mapping[str, Cell],
        settings: Mapping[str, Any] | None = None,
        *,
        key: int = 0,
        anew: bool = False,
    ) -> None:
        self.path, self._columns = path, columns
        self._settings = (
            None if settings is None else {name: str(value) for name, value in settings.items()}
        )
        self.rows: list[dict[str, Any]] = []
        #: Whether the file exists and holds :attr:`rows`. If not, the first row creates it.
        self._begun = False
        lines = whole_lines(path) if path.is_file() else []
        heads = 1 if settings is None else 2
        if not lines:
            return
        differ = self._differences(lines[0])
        if anew and differ:
            return
        if differ:
            raise ConfigurationError(
                f"{path} holds results of other settings: {listed(differ)}. Go on with those, move the file away, or "
                "name another folder."
            )
        if len(lines) < heads:
            return
        self.rows = [row for _, row in read_rows(path, columns, skip=heads - 1)]
        if lines[heads - 1] != (
            head := csv_text([list(columns)]).decode().strip()
        ):  # rows to come would not fit
            raise ConfigurationError(
                f"{path} has the columns {lines[heads - 1]}: expected {head}. Move the file away, or name another "
                "folder."
            )
        self._begun = True
        if not path.read_bytes().endswith(b"\n"):
            self._drop_last(lines, heads, list(columns)[:key])

    def add(self, rows: Iterable[Sequence[object]]) -> None:
        """Append the rows, all or none."""
        if self._begun:
            append(self.path, csv_text(rows))
        else:
            self.replace(rows)

    def replace(self, rows: Iterable[Sequence[object]]) -> None:
        """Replace the file's contents with these rows."""
        first = "" if self._settings is None else f"# {json.dumps(self._settings)}\n"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(self.path) as file:
            file.write(first.encode() + csv_text([list(self._columns), *rows]))
        self._begun = True

    def _differences(self, first: str) -> list[str]:
        """Describe the settings that differ from those in the file's first line."""
        if self._settings is None:
            return []
        try:
            before = dict(json.loads(first.removeprefix("# ")))
        except (ValueError, TypeError, RecursionError):
            return ["its first line does not say of which"]
        pairs = {
            name: (self._settings.get(name), before.get(name))
            for name in {**before, **self._settings}
        }
        return [
            f"{name} is {now} and was {then}" for name, (now, then) in pairs.items() if now != then
        ]

    def _drop_last(self, lines: Sequence[str], heads: int, key: Sequence[str]) -> None:
        """Drop the last result, which may be incomplete."""
        last = [self.rows[-1][name] for name in key] if self.rows else []
        kept = [
            place
            for place, row in enumerate(self.rows)
            if [row[name] for name in key] != last or not key
        ]
        self.rows = [self.rows[place] for place in kept]
        whole_rows = [*lines[:heads], *(lines[heads + place] for place in kept)]
        with replacing(self.path) as file:
            file.write("".join(f"{line}\n" for line in whole_rows).encode())


def read_members(cell: str) -> tuple[int, ...]:
    """Parse the text of a coalition, such as ``0+2``, or ``-`` for the empty one."""
    found = () if cell == "-" else tuple(map(parse_int, cell.split("+")))
    if list(found) != sorted(set(found)):
        raise ValueError("clients' numbers, ascending, with + between them, or -")
    return found


def members_text(coalition: Iterable[int]) -> str:
    """Format a coalition as text that :func:`read_members` parses."""
    return "+".join(map(str, coalition)) or "-"
