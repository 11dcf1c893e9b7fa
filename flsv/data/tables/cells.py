"""Cells of tables, as they are written, and as numbers and dates. What columns mean is not decided here."""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from io import StringIO
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import pandas as pd
from pandas.api.types import is_datetime64_any_dtype, is_numeric_dtype

from flsv.data.sources.places import TableRows
from flsv.utilities.declared import Rules, checked
from flsv.utilities.errors import ConfigurationError, in_words, listed

#: Marks of missing values, unless a column has others.
USUAL_GAPS = ("", "NA", "N/A", "NaN", "nan", "null", ".", "?")
#: Largest size of numbers to read: beyond it float32 is infinite.
LARGEST_NUMBER = 3e38
#: Spaces between groups of three digits.
_SPACES = " \u00a0\u202f"
_MAX_FIELD_LENGTH = 2**31 - 1
_FRACTION = re.compile(r"-?\d+\.(?!0$)\d+")
_WHOLE = re.compile(r"^(-?\d+)\.0$")


@checked
@dataclass(frozen=True)
class FileFormat:
    """Notation of a text file, in the words of ``pandas.read_csv``.

    Args:
        sep: separator of cells. None: the most frequent one of comma, semicolon, tab and vertical bar in the header.
        encoding: encoding of the text.
        decimal: decimal mark.
        thousands: separator of thousands, or None.
        date_format: format of dates, as for ``strftime``.
    """

    rules: ClassVar[Rules] = (
        (lambda a: a.sep is None or len(a.sep) == 1, "sep={sep!r}: expected one character."),
    )

    sep: str | None = None
    encoding: str = "utf-8-sig"
    decimal: Literal[".", ","] = "."
    thousands: Literal[".", ",", " ", "'"] | None = None
    date_format: str = "ISO8601"


def read_text_file(
    path: Path,
    file_format: FileFormat,
) -> tuple[pd.DataFrame, np.ndarray]:
    """Return the cells of a text file as they are written, and the line in which each row ends, int64 ``[N]``."""
    text = _text_of(path, file_format.encoding)
    separator = file_format.sep or _frequent_separator(path, text)
    csv.field_size_limit(_MAX_FIELD_LENGTH)
    reader = csv.reader(StringIO(text, newline=""), delimiter=separator)
    names: list[str] = []
    rows = []
    lines = []
    for cells in reader:
        stripped_cells = [cell.strip() for cell in cells]
        if stripped_cells in ([], [""]):  # an empty line
            continue
        line = f"{path}, line {reader.line_num}"
        if not names:
            names = stripped_cells
            _check_distinct(names, str(path))
            continue
        if len(cells) != len(names):
            raise ConfigurationError(
                f"{line}: {len(cells)} values, but the header has {len(names)} names. Write quotation marks around "
                f"cells that contain {separator!r}, or name the separator of cells, such as "
                f'read: {{"{path.name}": {{"sep": ";"}}}}.'
            )
        if stripped_cells == names:
            raise ConfigurationError(f"{line}: the columns' names again. Remove this line.")
        rows.append(cells)
        lines.append(reader.line_num)
    frame = pd.DataFrame(rows, columns=names, dtype=object)
    return frame, np.array(lines, dtype=np.int64)


def _text_of(path: Path, encoding: str) -> str:
    data = path.read_bytes()
    name = path.name
    if b"\0" in data and "16" not in encoding:
        raise ConfigurationError(
            f'{path} has zero bytes, as text in UTF-16 has: read: {{"{name}": {{"encoding": "utf-16"}}}}.'
        )
    try:
        text = data.decode(encoding)
    except (UnicodeError, LookupError) as error:
        raise ConfigurationError(
            f"{path} is not in {encoding}: {error}. Save it in UTF-8, or name its encoding, as cp1252 of "
            f'Excel in Western Europe: read: {{"{name}": {{"encoding": "cp1252"}}}}.'
        ) from error
    if not text.strip():
        raise ConfigurationError(
            f"{path} is empty: expected a line with the columns' names, and rows of values."
        )
    return text


def _frequent_separator(path: Path, text: str) -> str:
    header = text.lstrip("\r\n").splitlines()[0]
    unquoted_parts = header.split('"')[::2]
    separators = "\t,;|" if path.suffix.lower() == ".tsv" else ",;\t|"
    return max(separators, key="".join(unquoted_parts).count)


@dataclass(frozen=True)
class Cells(TableRows):
    """A table's cells.

    Args:
        frame: the cells, indexed by the number of the row. Those of a text file are texts.
        name: the table's name, or its client's.
        file_format: how numbers and dates are written.
        row_lines: the line of a text file in which each of its rows ends, int64 ``[N]``. None: a typed table.
        path: where the table is, for messages. Empty: its name.
    """

    frame: pd.DataFrame
    name: str = "the table"
    file_format: FileFormat = field(default_factory=FileFormat)
    row_lines: np.ndarray | None = None
    path: str = ""
    _words: dict[str, pd.Series] = field(
        default_factory=dict,
        init=False,
        repr=False,
    )
    _numbers: dict[tuple[str, str], np.ndarray] = field(
        default_factory=dict,
        init=False,
        repr=False,
    )

    def __len__(self) -> int:
        return len(self.frame)

    @property
    def is_text_file(self) -> bool:
        return self.row_lines is not None

    @property
    def title(self) -> str:
        """Name of the table in messages."""
        return self.path or self.name

    def take(self, rows: np.ndarray) -> Cells:
        """Return only the rows at some positions."""
        return replace(self, frame=self.frame.iloc[rows])

    def lines(self) -> np.ndarray:
        """Return the line in which each row ends, or its number in a typed table, int64 ``[N]``."""
        row_numbers = self.frame.index.to_numpy()
        return row_numbers if self.row_lines is None else self.row_lines[row_numbers]

    def where(self, rows: Sequence[int]) -> str:
        """Return text for messages that names rows by their lines."""
        lines = self.lines()[list(rows)].tolist()
        noun = "line" if self.is_text_file else "row"
        return f"{self.title}, {noun} {in_words(lines)}"

    def check_has(self, name: str, argument: str) -> None:
        """Raise ConfigurationError that mentions the user's argument if there is no such column."""
        if name not in self.frame:
            names = listed(self.frame, 20)
            raise ConfigurationError(
                f"{self.name} has no column {name!r} ({argument}). It has {names}.",
                without_data=f"its table has no column {name!r} ({argument})",
            )

    def words(self, name: str, argument: str = "the data dictionary") -> pd.Series:
        """Return a column's cells as a categorical of texts, NaN where a typed one is missing."""
        self.check_has(name, argument)
        if name not in self._words:
            self._words[name] = texts_of(self.frame[name])
        return self._words[name]

    def numbers(self, name: str, unit: str = "") -> np.ndarray:
        """Return a column's cells as numbers, float64 ``[N]``, NaN for what is none in the table's notation.

        A number may have ``unit`` behind it.
        """
        key = (name, unit)
        if key not in self._numbers:
            typed_cells = self.frame[name]
            self._numbers[key] = numbers_of(typed_cells, self.file_format, unit)
        return self._numbers[key]

    def is_missing(self, name: str, marks: Sequence[str]) -> np.ndarray:
        """Return which of a column's cells have no value or one of the marks, bool ``[N]``."""
        words = self.words(name)
        return (words.isna() | words.isin(marks)).to_numpy()


def read_cells(
    source: Any,
    file_format: FileFormat | None = None,
) -> Cells:
    """Read the cells of a text file with a header, a Parquet file or a DataFrame (pandas, polars, Arrow)."""
    file_format = file_format or FileFormat()
    is_file = isinstance(source, str | Path)
    name = str(source) if is_file else type(source).__name__
    row_lines = None
    if isinstance(source, pd.DataFrame):
        frame = source
    elif not is_file:
        frame = source.to_pandas()
    elif Path(source).suffix.lower() == ".parquet":
        frame = _read_parquet(Path(source))
    else:
        frame, row_lines = read_text_file(Path(source), file_format)

    column_names = [str(column).strip() for column in frame]
    _check_distinct(column_names, name)
    return Cells(
        frame=frame.set_axis(column_names, axis=1).reset_index(drop=True),
        name=name,
        file_format=file_format,
        row_lines=row_lines,
        path=name if is_file else "",
    )


def _check_distinct(names: Sequence[str], table_name: str) -> None:
    """Raise ConfigurationError if columns have no name, or the same one."""
    invalid_names = [name for name in names if not name or names.count(name) > 1]
    if invalid_names:
        raise ConfigurationError(
            f"{table_name}: columns are called {listed(invalid_names, show=repr)}. Each column needs a name of its own."
        )


def _read_parquet(path: Path) -> pd.DataFrame:
    try:
        return pd.read_parquet(path, engine="pyarrow")
    except (ValueError, OSError) as error:  # pyarrow's errors are subclasses
        raise ConfigurationError(f"{path} cannot be read as a Parquet file: {error}") from error


def texts_of(cells: pd.Series) -> pd.Series:
    """Return cells as a categorical of texts, NaN where a typed one is missing.

    Numbers that are whole get no point, unless the column has fractions: a gap gives 7 a fraction, and 7.0 is a version
    beside 7.5.
    """
    number_of_cell, distinct_cells = pd.factorize(cells)  # -1 for what is missing
    texts = [str(cell).strip() for cell in distinct_cells]
    have_fractions = any(map(_FRACTION.fullmatch, texts))
    if not have_fractions:
        texts = [_WHOLE.sub(r"\1", text) for text in texts]

    number_of_text, distinct_texts = pd.factorize(np.array(texts, dtype=object))
    numbers = np.append(number_of_text, -1)[number_of_cell]
    words = pd.Categorical.from_codes(numbers, categories=distinct_texts)
    return pd.Series(words, index=cells.index)


def numbers_of(cells: pd.Series, file_format: FileFormat, unit: str = "") -> np.ndarray:
    """Return numbers, float64 ``[N]``, NaN for what is none in the file's notation, with or without the unit."""
    if is_numeric_dtype(cells):
        return cells.to_numpy(dtype=float, na_value=np.nan)
    number_of_cell, distinct_cells = pd.factorize(cells)  # -1 for what is missing
    texts = pd.Series(distinct_cells, dtype=object)
    if unit or file_format.decimal != "." or file_format.thousands is not None:
        texts = _with_points(texts, file_format, unit)
    parsed_texts = pd.to_numeric(texts, errors="coerce")
    numbers = parsed_texts.to_numpy(dtype=float, na_value=np.nan)
    numbers_with_gap = np.append(numbers, np.nan)
    numbers_with_gap[np.isinf(numbers_with_gap)] = np.nan
    return numbers_with_gap[number_of_cell]


def _with_points(texts: pd.Series, file_format: FileFormat, unit: str) -> pd.Series:
    """Write numbers with decimal points and without separators or unit, and all else as None."""
    decimal = f"[{file_format.decimal}]"
    thousands = file_format.thousands
    mark = f"[{_SPACES}]" if thousands == " " else f"[{thousands}]"
    groups = rf"|\d{{1,3}}({mark}\d{{3}})+" if thousands else ""
    # What Python alone reads as numbers is none: 1_000, 0x10, infinity.
    number = rf"((\d+{groups})({decimal}\d*)?|{decimal}\d+)"
    unit_pattern = rf"({re.escape(unit)})?\s*"
    is_number = texts.str.fullmatch(  # NaN for no text
        rf"\s*[-+]?{number}([eE][-+]?\d+)?\s*{unit_pattern}"
    )
    plain_texts = texts
    if unit:
        plain_texts = plain_texts.str.replace(rf"{unit_pattern}$", "", regex=True)
    if thousands:
        plain_texts = plain_texts.str.replace(mark, "", regex=True)
    plain_texts = plain_texts.str.replace(file_format.decimal, ".")
    return plain_texts.where(is_number == True, texts.where(is_number.isna()))  # noqa: E712


def dates_of(cells: pd.Series, file_format: FileFormat) -> pd.Series:
    """Return dates in UTC, NaT for what is none in the file's format."""
    if not is_datetime64_any_dtype(cells):
        cells = texts_of(cells)
    return pd.to_datetime(
        cells,
        format=file_format.date_format,
        errors="coerce",
        utc=True,
    )


def format_of(
    formats: Mapping[str, FileFormat],
    client: str,
    source: Any,
) -> FileFormat:
    """Return the notation of a client's file: by the client's name, the file's name, or ``"*"`` for all."""
    names = [client]
    if isinstance(source, str | Path):
        names += [Path(source).name, Path(source).stem]
    for name in [*names, "*"]:
        if name in formats:
            return formats[name]
    return FileFormat()
