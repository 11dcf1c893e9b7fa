"""Functions that write CSV files, safe to open in a spreadsheet, and read them."""
# A spreadsheet runs text that begins with =, +, - or @ as a formula, which may fetch data. Such text is written with a
# leading ', which is removed on reading. Every row is on one line, so a row that a kill cut short is recognized by its
# missing line end.

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

if TYPE_CHECKING:  # pandas is slow to import
    from pandas import DataFrame

#: Function that converts a cell's text, or raises ValueError with a description of the expected text.
Cell = Callable[[str], Any]
NAN = float("nan")
#: Text that a spreadsheet could run as a formula. It is written with a leading ``'``, even if it has one already, since
#: reading removes one.
_FORMULA = re.compile("'*[=+@-]")


def csv_text(rows: Iterable[Sequence[object]]) -> bytes:
    """Encode rows as CSV in UTF-8, without NaN and without formulas that a spreadsheet would run."""
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    for row in rows:
        writer.writerow(map(_cell, row))
    return text.getvalue().encode()


def _cell(value: object) -> object:
    if isinstance(value, str):
        return as_text(value)
    is_nan = value != value
    return "" if is_nan else value


def save_csv(path: Path, rows: Iterable[Sequence[object]]) -> None:
    """Write rows to a CSV file, and replace an earlier one."""
    with replacing(path) as file:
        file.write(csv_text(rows))


def save_table(path: Path, table: DataFrame) -> None:
    """Write a data frame without its index to a CSV file, and replace an earlier one."""
    save_csv(path, [list(table), *table.itertuples(index=False, name=None)])


@lru_cache(maxsize=10_000)  # names are repeated in every row and every round
def as_text(cell: str) -> str:
    """Return a cell's text on one line. Formulas that a spreadsheet would run get a leading ``'``."""
    text = " ".join(cell.split())
    if _FORMULA.match(text) and not _is_number(text):
        return f"'{text}"
    return text


def numbers_text(numbers: Iterable[float]) -> str:
    """Format numbers for one cell, with a space between them.

    Example:
        >>> numbers_text([0.25, -1e-07])
        '0.25 -1e-07'
    """
    return " ".join(f"{number:.6g}" for number in numbers)


def parse_numbers(cell: str) -> list[float]:
    """Parse the numbers in a cell of :func:`numbers_text`."""
    return [float(number) for number in cell.split()]


def read_rows(
    path: Path,
    needed: Mapping[str, Cell],
    skip: int = 0,
) -> Iterator[dict[str, Any]]:
    """Yield ``{column: value}`` for each row of a CSV file. ``needed`` maps columns to parsers."""
    lines = whole_lines(path)[skip:]
    number_of_head = skip + 1
    columns = []
    if lines:
        columns = _cells(path, number_of_head, lines[0])
    _check_columns(path, columns, needed)
    for number, line in enumerate(lines[1:], start=number_of_head + 1):
        cells = _cells(path, number, line)
        row_label = f"{path}, line {number}"
        if len(cells) != len(columns):
            raise ConfigurationError(f"{row_label}: {len(cells)} cells, expected {len(columns)}.")
        yield _parsed_row(zip(columns, cells), needed, row_label)


def _parsed_row(
    cells: Iterable[tuple[str, str]],
    needed: Mapping[str, Cell],
    row_label: str,
) -> dict[str, Any]:
    """Return a row's values by column. An error names the row's place."""
    row = {}
    for name, cell in cells:
        parse = needed.get(name, str)
        try:
            row[name] = parse(cell)
        except ValueError as error:
            raise ConfigurationError(
                f"{row_label}: {name} is {cell[:60]!r}, expected {error}."
            ) from None
    return row


def _check_columns(path: Path, columns: Sequence[str], needed: Mapping[str, Cell]) -> None:
    is_complete = set(needed) <= set(columns)
    if not is_complete or len(set(columns)) < len(columns):
        columns_shown = ", ".join(map(repr, columns)) or "none"
        raise ConfigurationError(
            f"{path} has the columns {columns_shown}: expected {', '.join(needed)}, each once."
        )


def parse_int(cell: str) -> int:
    """Parse a non-negative integer."""
    is_number = cell.isascii() and cell.isdigit()
    if not is_number or len(cell) >= 19:
        raise ValueError("a whole number from 0 on")
    return int(cell)


def parse_float(cell: str) -> float:
    """Parse a number that is not NaN."""
    value = float(cell) if _is_number(cell) else NAN
    if value != value:
        raise ValueError("a number")
    return value


def number_or_nan(cell: str) -> float:
    """Parse a number, or NaN from an empty cell or ``nan``."""
    if cell in ("", "nan"):
        return NAN
    return parse_float(cell)


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return cell.isascii() and "_" not in cell and cell == cell.strip()


def _cells(
    path: Path,
    number: int,
    line: str,
) -> list[str]:
    """Split a line, whose number messages show, into cells before :func:`as_text`."""
    try:
        cells = next(csv.reader([line], strict=True))
    except csv.Error as error:
        raise ConfigurationError(
            f"{path}, line {number}: {error}. Expected values that are separated by commas."
        ) from None
    return [_original_text(cell) for cell in cells]


def _original_text(cell: str) -> str:
    if cell.startswith("'") and _FORMULA.match(cell):
        return cell[1:]
    return cell
