"""Text files of tables. pandas reads whole columns, and the bytes of all cells show what is doubtful."""

from __future__ import annotations

import csv
import io
import re
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import compress
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from flsv.data.sources.agreed import LARGEST_NUMBER
from flsv.data.sources.notation import parse_numbers
from flsv.utilities.errors import ConfigurationError, listed

_LINE_FEED, _CARRIAGE_RETURN, _QUOTE, _POINT, _ZERO = b'\n\r".0'
_ALL_BYTES = np.arange(256)
#: Whether each byte is one of some characters.
_IS_SPACE = np.isin(_ALL_BYTES, list(b" \t"))
_IS_SIGN = np.isin(_ALL_BYTES, list(b"+-"))
_IS_DIGIT = np.isin(_ALL_BYTES, list(b"0123456789"))
#: Largest number of characters of a value: the csv module's limit, 131,072, is too low for long texts.
_MAX_FIELD_LENGTH = 2**31 - 1
_HINT_ABOUT_QUOTES = "A value that contains {!r} or a quotation mark needs quotes."
_NUM_FIRST_ROWS = 100
#: Rows whose cells are looked at together: they should fit into a processor's cache.
_NUM_ROWS_AT_ONCE = 500
#: Numbers are those that ``float`` reads, which later versions of pandas do without an option.
_EXACT: dict[str, Any] = {}
_MAJOR, _MINOR, *_ = map(int, re.findall(r"\d+", pd.__version__))
if (_MAJOR, _MINOR) < (3, 1):
    _EXACT = {"float_precision": "round_trip"}


@dataclass(frozen=True)
class TextFile:
    """The rows of values of a text file, without its header."""

    names: list[str]
    delimiter: str
    # The rows in UTF-8.
    data: bytes
    # Which rows of `data` are blank lines, which are no rows of the table.
    is_blank: np.ndarray
    # The line of the file in which each of the N other rows ends, int64 [N].
    lines: np.ndarray
    # The position in `data` of each row's first byte, int64 [N].
    row_starts: np.ndarray
    # The position of what ends each cell, int64 [N, columns].
    cell_ends: np.ndarray

    def columns(
        self,
        marks_of: Callable[[str], set[str]],
        text_names: Collection[str],
    ) -> pd.DataFrame:
        """Return all columns: numbers, float64, if each cell plainly is one or a gap, and else texts."""
        # `marks_of` gives the marks of a column's missing values. Columns of `text_names` are texts in any case.
        if len(self.lines) == 0:
            return pd.DataFrame(columns=self.names, dtype=object)
        number_marks = {}
        word_marks = {}
        for name, is_doubtful in zip(self.names, self._are_doubtful()):
            if name not in text_names and not is_doubtful:
                marks = sorted(marks_of(name))
                numbers = parse_numbers(marks)
                is_word = np.isnan(numbers)
                number_marks[name] = numbers
                word_marks[name] = list(compress(marks, is_word))

        # Most columns look like their first rows, and are then read once.
        first_rows = self._read(
            self.names,
            nrows=_NUM_FIRST_ROWS,
            na_values=word_marks,
        )
        for name in list(word_marks):
            if first_rows[name].dtype.kind not in "iuf":
                del word_marks[name]
        text_columns = set(self.names).difference(word_marks)
        dtypes = dict.fromkeys(text_columns, object)
        all_rows = self._read(
            self.names,
            dtype=dtypes,
            na_values=word_marks,
        )
        columns = dict(all_rows.items())

        other_texts = []
        for name in word_marks:
            plain_numbers = self._plain_numbers(columns[name], marks_of(name))
            if plain_numbers is None:
                other_texts.append(name)
                continue
            is_gap = np.isin(plain_numbers, number_marks[name])
            columns[name] = plain_numbers.mask(is_gap)
        if other_texts:
            texts = self.texts(other_texts)
            columns |= dict(texts.items())
        return pd.DataFrame(columns, copy=False)

    def texts(self, names: Sequence[str]) -> pd.DataFrame:
        """Return the texts of columns."""
        return self._read(names, dtype=object)

    def _read(self, names: Sequence[str], **options: Any) -> pd.DataFrame:
        frame = pd.read_csv(
            io.BytesIO(self.data),
            sep=self.delimiter,
            header=None,
            names=self.names,
            usecols=names,
            index_col=False,
            skip_blank_lines=False,
            keep_default_na=False,
            low_memory=False,
            encoding="utf-8",
            **options,
            **_EXACT,
        )
        if self.is_blank.any():
            is_row = ~self.is_blank[: len(frame)]
            frame = frame[is_row]
        lines = self.lines[: len(frame)]
        return frame.set_axis(lines)

    def _plain_numbers(
        self,
        column: pd.Series,
        marks: Collection[str],
    ) -> pd.Series | None:
        """Return a column's numbers, float64, NaN for a gap, or None if a cell is neither."""
        if column.dtype.kind not in "iuf":
            return None
        numbers = column.astype(np.float64)
        if (numbers.abs() > LARGEST_NUMBER).any():
            return None

        # Some versions of pandas read NAN as a number.
        position = self.names.index(column.name)
        rows = np.flatnonzero(numbers.isna())
        bounds_of_gaps = self._bounds(rows)[:, position : position + 2]
        for end_before, end in bounds_of_gaps.tolist():
            cell = self.data[end_before + 1 : end]
            if cell.decode().strip('"') not in marks:
                return None
        return numbers

    def _bounds(self, rows: np.ndarray | slice) -> np.ndarray:
        """Return what is before each row's first cell, and the ends of its cells, int64 ``[rows, columns + 1]``."""
        before_rows = self.row_starts[rows] - 1
        return np.column_stack([before_rows, self.cell_ends[rows]])

    def _are_doubtful(self) -> np.ndarray:
        """Return which columns, if they have numbers, have to be read from texts, bool ``[columns]``."""
        # A cell has spaces or a leading zero. Or there are cells of few digits, cells with three digits after a point,
        # which may separate thousands, and no others.
        characters = np.frombuffer(self.data, dtype=np.uint8)
        num_columns = len(self.names)
        is_doubtful = np.zeros(num_columns, dtype=bool)
        has_short = np.zeros(num_columns, dtype=bool)
        has_grouped = np.zeros(num_columns, dtype=bool)
        has_others = np.zeros(num_columns, dtype=bool)
        for first_row in range(0, len(self.lines), _NUM_ROWS_AT_ONCE):
            rows = slice(first_row, first_row + _NUM_ROWS_AT_ONCE)
            bounds = self._bounds(rows)
            first_bytes = bounds[:, :-1] + 1
            is_quoted = characters[first_bytes] == _QUOTE
            first_bytes += is_quoted
            end_bytes = bounds[:, 1:] - is_quoted
            lengths = end_bytes - first_bytes
            is_empty = lengths == 0

            first_characters = characters[first_bytes]
            has_space = _IS_SPACE[first_characters] | _IS_SPACE[characters[end_bytes - 1]]
            first_digits = first_bytes + _IS_SIGN[first_characters]
            second_digits = np.minimum(first_digits + 1, end_bytes)  # an end is no digit
            is_followed = _IS_DIGIT[characters[second_digits]]
            has_leading_zero = is_followed & (characters[first_digits] == _ZERO)
            is_unclear = has_space | has_leading_zero
            is_doubtful |= (is_unclear & ~is_empty).any(axis=0)

            is_short = lengths <= 4  # as -873
            fourth_last = characters[np.maximum(end_bytes - 4, 0)]
            is_grouped = ~is_short & (fourth_last == _POINT)
            has_short |= (is_short & ~is_empty).any(axis=0)
            has_grouped |= is_grouped.any(axis=0)
            has_others |= ~(is_short | is_grouped).all(axis=0)
        return is_doubtful | (has_short & has_grouped & ~has_others)


def read_text_file(path: Path, text: str, delimiter: str) -> TextFile:
    """Find the cells of a text with a header. What is no table is refused, with the line."""
    data = _ended(text)
    if not _has_regular_quotes(data, delimiter):
        data = _ended(_requoted(path, text, delimiter))
    characters = np.frombuffer(data, dtype=np.uint8)
    is_line_end = characters == _LINE_FEED
    if b"\r" in data:
        is_return = characters == _CARRIAGE_RETURN
        is_return[:-1] &= ~is_line_end[1:]
        is_line_end |= is_return
    line_ends = np.flatnonzero(is_line_end)
    cell_ends = np.flatnonzero(is_line_end | (characters == ord(delimiter)))

    # What comes after an odd number of quotation marks is part of a cell.
    quotes = np.flatnonzero(characters == _QUOTE)
    row_ends = line_ends
    if len(quotes):
        row_ends = line_ends[np.searchsorted(quotes, line_ends) % 2 == 0]
        cell_ends = cell_ends[np.searchsorted(quotes, cell_ends) % 2 == 0]
    lines = np.searchsorted(line_ends, row_ends) + 1
    row_starts = np.append(0, row_ends[:-1] + 1)
    last_cells = np.searchsorted(cell_ends, row_ends)
    num_cells = np.diff(last_cells, prepend=-1)

    # A row's text ends before both characters of a line end of Windows.
    is_feed = characters[row_ends] == _LINE_FEED
    text_ends = row_ends - (is_feed & (characters[row_ends - 1] == _CARRIAGE_RETURN))
    is_blank = text_ends == row_starts
    rows = np.flatnonzero(~is_blank)
    if len(rows) == 0:
        raise ConfigurationError(
            f"{path} is empty: expected a line with the columns' names, and rows of values."
        )

    def cells_of(row: int) -> list[str]:
        row_text = data[row_starts[row] : text_ends[row]].decode()
        (cells,) = csv.reader([row_text], delimiter=delimiter)
        return [cell.strip() for cell in cells]

    header_row = rows[0]
    rows = rows[1:]
    names = cells_of(header_row)
    check_column_names(path, names)
    wrong_positions = np.flatnonzero(num_cells[rows] != len(names))
    num_sound_rows = min(wrong_positions, default=len(rows))

    # A header again may have spaces or quotation marks before its first name.
    first_name = names[0].encode()
    first_characters = list(first_name[:1] + b' \t"')
    may_be_header = np.isin(characters[row_starts[rows]], first_characters)
    for row in rows[:num_sound_rows][may_be_header[:num_sound_rows]]:
        if cells_of(row) == names:
            raise ConfigurationError(
                f"{path}, line {lines[row]}: the columns' names again. Remove this line."
            )
    if num_sound_rows < len(rows):
        row = rows[num_sound_rows]
        raise ConfigurationError(
            f"{path}, line {lines[row]}: {num_cells[row]} values, but the header has {len(names)} names. "
            f"{_HINT_ABOUT_QUOTES.format(delimiter)}"
        )

    num_bytes_of_header = int(row_ends[header_row]) + 1
    cell_ends = np.delete(cell_ends, last_cells[is_blank])
    ends_by_row = cell_ends.reshape(-1, len(names))[1:]  # without the header's
    ends_by_row[:, -1] = text_ends[rows]
    return TextFile(
        names,
        delimiter,
        data=data[num_bytes_of_header:],
        is_blank=is_blank[header_row + 1 :],
        lines=lines[rows],
        row_starts=row_starts[rows] - num_bytes_of_header,
        cell_ends=ends_by_row - num_bytes_of_header,
    )


def _ended(text: str) -> bytes:
    data = text.encode()
    return data if data.endswith(b"\n") else data + b"\n"


def _has_regular_quotes(data: bytes, delimiter: str) -> bool:
    """Return whether quotation marks are around whole cells, or doubled in these."""
    characters = np.frombuffer(data, dtype=np.uint8)
    quotes = np.flatnonzero(characters == _QUOTE)
    if len(quotes) % 2:
        return False
    neighbours = [_LINE_FEED, _CARRIAGE_RETURN, ord(delimiter), _QUOTE]
    before_openings = characters[quotes[0::2] - 1]  # at the start this is the last character
    after_closings = characters[quotes[1::2] + 1]
    are_around = np.isin(before_openings, neighbours) & np.isin(after_closings, neighbours)
    return bool(are_around.all())


def _requoted(path: Path, text: str, delimiter: str) -> str:
    """Put quotation marks around cells that have some in them, as ``5" pipe``. Lines stay."""
    csv.field_size_limit(_MAX_FIELD_LENGTH)
    stream = io.StringIO(text, newline="")
    reader = csv.reader(stream, delimiter=delimiter, strict=True)
    requoted = io.StringIO(newline="")
    writer = csv.writer(requoted, delimiter=delimiter, lineterminator="\n")
    try:
        writer.writerows(reader)
    except csv.Error as error:
        raise ConfigurationError(
            f"{path}, line {reader.line_num}: {error}. {_HINT_ABOUT_QUOTES.format(delimiter)}"
        ) from error
    return requoted.getvalue()


def check_column_names(path: Path | str, names: Sequence[str]) -> None:
    """Raise ConfigurationError if a column has no name, or two columns have the same name."""
    name_counts = Counter(names)
    invalid_names = [name for name in names if not name or name_counts[name] > 1]
    if invalid_names:
        raise ConfigurationError(
            f"{path}: columns are called {listed(invalid_names, show=repr)}. Every column needs a name of its own."
        )
