"""Comma-separated files, read strictly: what is no proper table is refused with the line that is wrong."""

from __future__ import annotations

import csv
import difflib
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from flsv.data.labels import in_words
from flsv.errors import ConfigurationError

_LIMIT = threading.Lock()


@dataclass(frozen=True)
class CSVFile:
    """A file's columns, as text; or those of an object that has columns.

    Args:
        path: the file, or what else the rows come from, for messages.
        columns: values by column name, ``N`` each.
        lines: the line of the file in which each row ends, ``N``.
        unit: what ``lines`` counts: lines of a file, or the rows of an object.
        kinds: of an object with columns, what :func:`~flsv.data.sets.column_kinds.kind_of` says of the values that they
            had there; None: there is nothing but the text.
    """

    path: Path | str
    columns: dict[str, list[str]]
    lines: list[int]
    unit: str = "line"
    kinds: Mapping[str, str] | None = None

    def __len__(self) -> int:
        return len(self.lines)

    def places(self, rows: Sequence[int]) -> str:
        """Where some rows are, in words.

        Example:
            >>> CSVFile("wards.csv", {}, [2, 3, 4, 9]).places([0, 1, 2, 3])
            'line 2 .. 4, 9'
        """
        return f"{self.unit} {in_words([self.lines[row] for row in rows])}"

    def column(self, name: str, argument: str) -> list[str]:
        """The values of a column.

        Args:
            name: of the column.
            argument: whose value ``name`` is, for the message.

        Raises:
            ConfigurationError: there is none of that name.
        """
        if name in self.columns:
            return self.columns[name]
        close = difflib.get_close_matches(name, self.columns, n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        shown = ", ".join(list(self.columns)[:20]) + (", ..." if len(self.columns) > 20 else "")
        raise ConfigurationError(f"{self.path} has no column {name!r} ({argument}).{hint} It has {shown}.")


def find_file(path: str, root: str) -> Path:
    """The file, looked up below ``root``, then as it is.

    Raises:
        ConfigurationError: there is none in either place.
    """
    places = [Path(root) / path, Path(path)]
    for place in places:
        if place.is_file():
            return place
    looked = " and ".join(str(place) for place in dict.fromkeys(place.absolute() for place in places))
    raise ConfigurationError(f"{path} was not found: looked at {looked}. Give root the folder that holds it.")


def read_csv(path: Path, delimiter: str = ",") -> CSVFile:
    """A file with a header line, in UTF-8 with or without a byte order mark; quoted values may span lines.

    Args:
        path: the file.
        delimiter: one character between values.

    Raises:
        ConfigurationError: not UTF-8, not a table, no rows, columns without a name or with the same one, or a row with
            more or fewer values than the header has names.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = Path(folder) / "wards.csv"
        ...     _ = path.write_text('ward,note\\nA,"slept, then ate"\\nB,\\n')
        ...     read_csv(path).columns
        {'ward': ['A', 'B'], 'note': ['slept, then ate', '']}
    """
    if len(delimiter) != 1:
        raise ConfigurationError(f"delimiter={delimiter!r}: expected one character, such as ',' or ';'.")
    rows, lines = [], []
    try:
        with path.open(encoding="utf-8-sig", newline="") as file, _long_values():
            reader = csv.reader(file, delimiter=delimiter, strict=True)
            header = next(reader, None)
            for row in reader:
                if "\0" in "".join(row):
                    raise csv.Error(f"line {reader.line_num} has a zero byte, as a damaged file or UTF-16 has")
                if row:  # a blank line is none
                    rows.append(row)
                    lines.append(reader.line_num)
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"{path} is not UTF-8 ({error}). Save it as UTF-8.") from error
    except (csv.Error, OSError) as error:
        raise ConfigurationError(f"{path} cannot be read as comma-separated values: {error}.") from error
    names = _names(path, header, delimiter)
    for row, line in zip(rows, lines):
        if len(row) != len(names):
            raise ConfigurationError(
                f"{path}, line {line}: {len(row)} values, but the header has {len(names)} names. A value with a "
                f"{delimiter!r} in it needs quotes."
            )
    if not rows:
        raise ConfigurationError(f"{path} has a header, but no rows.")
    return CSVFile(path, {name: [row[i] for row in rows] for i, name in enumerate(names)}, lines)


def _names(path: Path, header: Sequence[str] | None, delimiter: str) -> list[str]:
    if not header:
        raise ConfigurationError(f"{path} is empty, or its first line is. A line with the columns' names is needed.")
    names = [name.strip() for name in header]
    if len(names) == 1 and (other := next((mark for mark in ";\t," if mark in names[0]), None)):
        raise ConfigurationError(
            f"{path}: the header is a single name with {other!r} in it, {names[0][:60]!r}. Is that the separator? Then "
            f"give delimiter={other!r}; it is {delimiter!r}."
        )
    if "" in names:
        raise ConfigurationError(f"{path}: column {names.index('') + 1} has no name. Every column needs one.")
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ConfigurationError(f"{path}: several columns are called {twice!r}. Names must differ.")
    return names


@contextmanager
def _long_values() -> Iterator[None]:
    """Values of any length: the csv module's limit of 131,072 characters is a tale, and it is one for all threads."""
    with _LIMIT:
        before = csv.field_size_limit(2**31 - 1)
        try:
            yield
        finally:
            csv.field_size_limit(before)
