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
from flsv.utilities.formats import (
    VERSION_PREFIX,
    stored_package_versions,
    version_changes,
    warn_of_versions,
)


class ResultFile:
    """CSV file of results to which rows are appended.

    The first line stores the ``settings``. A file of other settings is an error, or with ``anew`` overwritten. Other
    versions of packages are a warning, since numbers may change. If the process was killed while writing, the last
    result is dropped: all rows that agree with the last row in the first ``key`` columns.
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
        self.path = path
        self.rows: list[dict[str, Any]] = []
        self._columns = columns
        self._settings: dict[str, str] | None = None
        if settings is not None:
            self._settings = {name: str(value) for name, value in settings.items()}
        #: Whether the file exists and holds :attr:`rows`. If not, the first row creates it.
        self._is_begun = False

        lines = []
        if path.is_file():
            lines = whole_lines(path)
        if not lines:
            return
        stored_settings = self._read_settings(lines[0])
        differences = self._differences(stored_settings)
        stored_versions = stored_package_versions(stored_settings)
        if anew and (differences or version_changes(stored_versions)):
            return
        if differences:
            raise ConfigurationError(
                f"{path} holds results of other settings: {listed(differences)}. Go on with those, move the file away, "
                "or name another folder."
            )
        warn_of_versions(str(path), stored_versions)
        if self._settings is not None:
            # The file keeps rows of the stored versions, so it keeps their names.
            self._settings |= stored_settings
        self._read_rows(lines, key=list(columns)[:key])

    def _read_rows(self, lines: Sequence[str], key: Sequence[str]) -> None:
        """Read the rows from a file's lines."""
        header_index = 0 if self._settings is None else 1
        if len(lines) <= header_index:
            return
        self.rows = [*read_rows(self.path, self._columns, skip=header_index)]
        header = lines[header_index]
        expected_header = csv_text([list(self._columns)]).decode().strip()
        if header != expected_header:  # rows to come would not fit
            raise ConfigurationError(
                f"{self.path} has the columns {header}: expected {expected_header}. Move the file away, or name "
                "another folder."
            )
        self._is_begun = True
        is_cut_off = not self.path.read_bytes().endswith(b"\n")
        if is_cut_off:
            self._drop_last_result(lines, first_row=header_index + 1, key=key)

    def add(self, rows: Iterable[Sequence[object]]) -> None:
        """Append the rows, all or none."""
        if self._is_begun:
            append(self.path, csv_text(rows))
        else:
            self.replace(rows)

    def replace(self, rows: Iterable[Sequence[object]]) -> None:
        """Replace the file's contents with these rows."""
        content = csv_text([list(self._columns), *rows])
        if self._settings is not None:
            settings = f"# {json.dumps(self._settings)}\n"
            content = settings.encode() + content
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(self.path) as file:
            file.write(content)
        self._is_begun = True

    def _read_settings(self, first_line: str) -> dict[str, str]:
        """Read the settings from the file's first line."""
        if self._settings is None:
            return {}
        try:
            return _settings_in(first_line)
        except (ValueError, TypeError, RecursionError) as error:
            raise ConfigurationError(
                f"{self.path} holds results of other settings: its first line does not say of which. Move the file "
                "away, or name another folder."
            ) from error

    def _differences(self, stored_settings: Mapping[str, str]) -> list[str]:
        """Describe the settings that differ from the file's, without versions of packages."""
        settings = self._settings or {}
        differences = []
        for name in {**stored_settings, **settings}:
            value = settings.get(name)
            stored_value = stored_settings.get(name)
            if value != stored_value and not name.startswith(VERSION_PREFIX):
                differences.append(f"{name} is {value} and was {stored_value}")
        return differences

    def _drop_last_result(
        self,
        lines: Sequence[str],
        *,
        first_row: int,
        key: Sequence[str],
    ) -> None:
        """Drop the last result, which may be incomplete."""
        # `rows` and `lines` lack the row that was cut off. Without a key, a row is a whole result. With a key, a result
        # has several rows, and its remaining rows are dropped, too.
        complete_lines = list(lines[:first_row])
        complete_rows = []
        for row, line in zip(self.rows, lines[first_row:]):
            has_key_of_last_row = all(row[name] == self.rows[-1][name] for name in key)
            if not key or not has_key_of_last_row:
                complete_rows.append(row)
                complete_lines.append(line)
        self.rows = complete_rows
        with replacing(self.path) as file:
            for line in complete_lines:
                file.write(f"{line}\n".encode())


def _settings_in(first_line: str) -> dict[str, str]:
    return dict(json.loads(first_line.removeprefix("# ")))


def stored_settings(path: Path) -> dict[str, str]:
    """Read the settings of a file of results. Empty if there is no file."""
    if not path.is_file():
        return {}
    first_line, *_lines = whole_lines(path)
    return _settings_in(first_line)


def read_members(cell: str) -> tuple[int, ...]:
    """Parse the text of a coalition, such as ``0+2``, or ``-`` for the empty one."""
    if cell == "-":
        return ()
    members = tuple(map(parse_int, cell.split("+")))
    if list(members) != sorted(set(members)):
        raise ValueError("clients' numbers, ascending, with + between them, or -")
    return members


def members_text(coalition: Iterable[int]) -> str:
    """Format a coalition as text that :func:`read_members` parses."""
    return "+".join(map(str, coalition)) or "-"
