"""Results that take long, kept as they come: a process that is killed loses the one that it was at, and no other.

One format for all of them: a CSV file to which rows are added. Where all of its rows are of one experiment, its first
line says of which, and results of another are refused.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from flsv.utilities.atomic_files import append, replacing, whole_lines
from flsv.utilities.csv_files import Cell, csv_text, parse_int, read_rows
from flsv.utilities.errors import ConfigurationError, listed


class ResultFile:
    """A CSV file of results to which rows are added.

    Args:
        path: the file; its folder is made with the first row.
        columns: their names, and how cells are read.
        settings: the settings, by name, that all rows are of; None: the file does not name any.
        key: number of leading columns that name a result of several rows; a result that a kill cut short is dropped
            as a whole. 0: every row is a result.
        anew: whether to begin anew where the file is of other settings.

    Attributes:
        rows: the rows that are there, as mappings by column.

    Raises:
        ConfigurationError: the file is one of other settings, which are named, or none of this kind.

    Example:
        >>> import tempfile
        >>> from flsv.utilities.csv_files import parse_float, parse_int
        >>> path, columns = Path(tempfile.mkdtemp(), "values.csv"), {"client": parse_int, "value": parse_float}
        >>> ResultFile(path, columns, {"rounds": 5}).add([[0, 0.25], [1, 0.5]])
        >>> ResultFile(path, columns, {"rounds": 5}).rows
        [{'client': 0, 'value': 0.25}, {'client': 1, 'value': 0.5}]
        >>> ResultFile(path, columns, {"rounds": 6})  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ...
        flsv.utilities.errors.ConfigurationError: ...holds results of other settings: rounds is 6 and was 5. ...
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
        self._settings = None if settings is None else {name: str(value) for name, value in settings.items()}
        self.rows: list[dict[str, Any]] = []
        #: Whether there is a file whose rows these are: else the first row begins it.
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
        self._begun = True
        if not path.read_bytes().endswith(b"\n"):
            self._drop_last(lines, heads, list(columns)[:key])

    def add(self, rows: Iterable[Sequence[object]]) -> None:
        """Append rows, cells in the columns' order, all of them or none."""
        new = csv_text(rows)
        if self._begun:
            append(self.path, new)
            return
        first = "" if self._settings is None else f"# {json.dumps(self._settings)}\n"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(self.path) as file:
            file.write(first.encode() + csv_text([list(self._columns)]) + new)
        self._begun = True

    def _differences(self, first: str) -> list[str]:
        """Name the settings that the file's first line gives otherwise."""
        if self._settings is None:
            return []
        try:
            before = dict(json.loads(first.removeprefix("# ")))
        except (ValueError, TypeError, RecursionError):
            return ["its first line does not say of which"]
        pairs = {name: (self._settings.get(name), before.get(name)) for name in {**before, **self._settings}}
        return [f"{name} is {now} and was {then}" for name, (now, then) in pairs.items() if now != then]

    def _drop_last(self, lines: Sequence[str], heads: int, key: Sequence[str]) -> None:
        """Drop the last result, of which a kill has left half."""
        last = [self.rows[-1][name] for name in key] if self.rows else []
        kept = [place for place, row in enumerate(self.rows) if [row[name] for name in key] != last or not key]
        self.rows = [self.rows[place] for place in kept]
        whole_rows = [*lines[:heads], *(lines[heads + place] for place in kept)]
        with replacing(self.path) as file:
            file.write("".join(f"{line}\n" for line in whole_rows).encode())


def read_members(cell: str) -> tuple[int, ...]:
    """Read a coalition's members, ascending: ``0+2``, or ``-`` for nobody.

    Raises:
        ValueError: it is none.

    Example:
        >>> read_members("0+2"), read_members("-"), members_text((0, 2))
        ((0, 2), (), '0+2')
    """
    found = () if cell == "-" else tuple(map(parse_int, cell.split("+")))
    if list(found) != sorted(set(found)):
        raise ValueError("clients' numbers, ascending, with + between them, or -")
    return found


def members_text(coalition: Iterable[int]) -> str:
    """Write a coalition's members as :func:`read_members` reads them."""
    return "+".join(map(str, coalition)) or "-"
