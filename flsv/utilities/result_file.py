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
from flsv.utilities.errors import ConfigurationError, listed
from flsv.utilities.formats import (
    VERSION_PREFIX,
    stored_package_versions,
    warn_of_versions,
)


class ResultFile:
    """CSV file of results to which rows are appended.

    The first line stores the ``settings``. A file of other settings is an error. Other versions of packages are a
    warning, since numbers may change. A row that a kill has cut off is dropped.
    """

    def __init__(
        self,
        path: Path,
        columns: Mapping[str, Cell],
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        self.path = path
        self.rows: list[dict[str, Any]] = []
        self._columns = columns
        self._settings: dict[str, str] = {}
        if settings is not None:
            self._settings = {name: str(value) for name, value in settings.items()}
        #: Whether the file has a first line with settings.
        self._has_settings = settings is not None
        #: Whether the file exists and holds :attr:`rows`. If not, the first row creates it.
        self._is_begun = False

        lines = []
        if path.is_file():
            lines = whole_lines(path)
        if not lines:
            return
        if self._has_settings:
            self._go_on_from(lines[0])
        header_index = 1 if self._has_settings else 0
        if len(lines) > header_index:
            self._read_rows(lines[header_index], skip=header_index)

    def _go_on_from(self, first_line: str) -> None:
        """Take over the settings of the file, or raise an error."""
        settings_of_file = self._parse_settings(first_line)
        differences = self._differences(settings_of_file)
        versions_of_file = stored_package_versions(settings_of_file)
        if differences:
            raise ConfigurationError(
                f"{self.path} holds results of other settings: {listed(differences)}. Go on with those, move the file "
                "away, or name another folder."
            )
        warn_of_versions(str(self.path), versions_of_file)
        # The file keeps rows of the stored versions, so it keeps their names.
        self._settings |= settings_of_file

    def _read_rows(self, header: str, skip: int) -> None:
        """Read the file's rows, and cut off the beginning of a row without its line end."""
        self.rows = [*read_rows(self.path, self._columns, skip=skip)]
        expected_header = csv_text([list(self._columns)]).decode().strip()
        if header != expected_header:  # rows to come would not fit
            raise ConfigurationError(
                f"{self.path} has the columns {header}: expected {expected_header}. Move the file away, or name "
                "another folder."
            )
        self._is_begun = True
        content = self.path.read_bytes()
        end_of_rows = content.rindex(b"\n") + 1
        if end_of_rows < len(content):
            with replacing(self.path) as file:
                file.write(content[:end_of_rows])

    def add(self, rows: Iterable[Sequence[object]]) -> None:
        """Append the rows, all or none."""
        if self._is_begun:
            append(self.path, csv_text(rows))
        else:
            self.replace(rows)

    def replace(self, rows: Iterable[Sequence[object]]) -> None:
        """Replace the file's contents with these rows."""
        content = csv_text([list(self._columns), *rows])
        if self._has_settings:
            settings = f"# {json.dumps(self._settings)}\n"
            content = settings.encode() + content
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(self.path) as file:
            file.write(content)
        self._is_begun = True

    def _parse_settings(self, first_line: str) -> dict[str, str]:
        try:
            return _settings_in(first_line)
        except (ValueError, TypeError, RecursionError) as error:
            raise ConfigurationError(
                f"{self.path} holds results of other settings: its first line does not say of which. Move the file "
                "away, or name another folder."
            ) from error

    def _differences(self, stored_settings: Mapping[str, str]) -> list[str]:
        """Describe the settings that differ from the file's, without versions of packages."""
        differences = []
        for name in {**stored_settings, **self._settings}:
            value = self._settings.get(name)
            stored_value = stored_settings.get(name)
            if value != stored_value and not name.startswith(VERSION_PREFIX):
                differences.append(f"{name} is {value} and was {stored_value}")
        return differences


def _settings_in(first_line: str) -> dict[str, str]:
    return dict(json.loads(first_line.removeprefix("# ")))


def stored_settings(path: Path) -> dict[str, str]:
    """Read the settings of a file of results. Empty if there is no file."""
    if not path.is_file():
        return {}
    first_line, *_lines = whole_lines(path)
    return _settings_in(first_line)
