"""CSV files that are safe to open in a spreadsheet, and how they are read back.

A spreadsheet runs a text that begins with ``=``, ``+``, ``-`` or ``@`` as a formula, with whatever it fetches. So such
a text gets a ``'`` before it when it is written, which spreadsheets show as text, and loses it when it is read: names
come back as they were. Numbers stay numbers. Every row is on one line, so that one that a kill cut short has no end.

What is read is checked: every cell is of the kind that its column says, or one line says where it is not.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flsv.utilities.atomic_files import replacing, whole_lines
from flsv.utilities.errors import ConfigurationError

if TYPE_CHECKING:  # which is slow to import
    from pandas import DataFrame

#: Reads a cell, or raises ValueError with what it expected.
Cell = Callable[[str], Any]
NAN = float("nan")
#: With the marks that are there already, so that the text that is read is the one that was written.
_FORMULA = re.compile("'*[=+@-]")


def csv_text(rows: Iterable[Sequence[object]]) -> bytes:
    """Encode rows as CSV in UTF-8, a line each.

    Example:
        >>> csv_text([("client", "value"), ("=1+1", -0.5)])
        b"client,value\\n'=1+1,-0.5\\n"
    """
    text = io.StringIO(newline="")
    lines = ([as_text(cell) if isinstance(cell, str) else cell for cell in row] for row in rows)
    csv.writer(text, lineterminator="\n").writerows(lines)
    return text.getvalue().encode()


def save_csv(path: Path, rows: Iterable[Sequence[object]]) -> None:
    """Write these rows in place of an earlier file as a whole."""
    with replacing(path) as file:
        file.write(csv_text(rows))


def save_table(path: Path, table: DataFrame) -> None:
    """Write a data frame without its index, in place of an earlier file as a whole; NaN is an empty cell.

    Example:
        >>> import tempfile
        >>> from pandas import DataFrame
        >>> path = Path(tempfile.mkdtemp(), "values.csv")
        >>> save_table(path, DataFrame({"client": [0, 1], "value": [0.5, NAN]}))
        >>> path.read_bytes()
        b'client,value\\n0,0.5\\n1,\\n'
    """
    rows = table.itertuples(index=False, name=None)
    save_csv(path, [list(table), *(["" if cell != cell else cell for cell in row] for row in rows)])


@lru_cache(maxsize=10_000)  # names are there in every row, and in every round
def as_text(cell: str) -> str:
    """Write a cell on one line, so that a spreadsheet shows it as text and does not run it.

    Example:
        >>> [as_text(cell) for cell in ("Boston", "@home", "-1", "'=1", "St.\\nAnna")]
        ['Boston', "'@home", '-1', "''=1", 'St. Anna']
    """
    text = " ".join(cell.split())
    return f"'{text}" if _FORMULA.match(text) and not _is_number(text) else text


def read_rows(path: Path, needed: Mapping[str, Cell], skip: int = 0) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the number and the cells, by column, of each line of a file that :func:`csv_text` wrote, from line 2 on; a
    last line that a kill cut short is left out.

    Args:
        path: the file.
        needed: columns that it has to have, and how they are read; others are texts.
        skip: lines before that of the columns' names.

    Raises:
        ConfigurationError: naming the file, and the line and what was expected in it.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp(), "values.csv")
        >>> _ = path.write_bytes(csv_text([("client", "value"), (0, 0.5), (1, "much")]))
        >>> rows = read_rows(path, {"client": parse_int, "value": parse_float})
        >>> next(rows)
        (2, {'client': 0, 'value': 0.5})
        >>> next(rows)  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ...
        flsv.utilities.errors.ConfigurationError: .../values.csv, line 3: value is 'much', expected a number.
    """
    lines = whole_lines(path)[skip:]
    head = _cells(path, skip + 1, lines[0]) if lines else []
    missing = [name for name in needed if name not in head]
    if missing or len(set(head)) < len(head):
        raise ConfigurationError(
            f"{path} has the columns {', '.join(map(repr, head)) or 'none'}: expected {', '.join(needed)}, each once."
        )
    for place, line in enumerate(lines[1:], skip + 2):
        cells = _cells(path, place, line)
        if len(cells) != len(head):
            raise ConfigurationError(f"{path}, line {place}: {len(cells)} cells, expected {len(head)}.")
        row = {}
        for name, cell in zip(head, cells):
            try:
                row[name] = needed.get(name, str)(cell)
            except ValueError as error:
                raise ConfigurationError(f"{path}, line {place}: {name} is {cell[:60]!r}, expected {error}.") from None
        yield place, row


def parse_int(cell: str) -> int:
    """Parse a whole number from 0 on."""
    if not (cell.isascii() and cell.isdigit() and len(cell) < 19):
        raise ValueError("a whole number from 0 on")
    return int(cell)


def parse_float(cell: str) -> float:
    """Parse a number; infinite only where that was written, as an epsilon without noise is."""
    value = float(cell) if _is_number(cell) else NAN
    if value != value:
        raise ValueError("a number")
    return value


def number_or_nan(cell: str) -> float:
    """Parse a number; an empty cell is NaN."""
    return NAN if cell in ("", "nan") else parse_float(cell)


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return cell.isascii() and "_" not in cell and cell == cell.strip()


def _cells(path: Path, place: int, line: str) -> list[str]:
    try:
        cells = next(csv.reader([line], strict=True))
    except csv.Error as error:
        raise ConfigurationError(f"{path}, line {place}: {error}; expected cells that are parted by commas.") from None
    return [cell[1:] if cell.startswith("'") and _FORMULA.match(cell) else cell for cell in cells]
