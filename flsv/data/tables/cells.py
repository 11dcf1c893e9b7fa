"""Cells of tables, as they are written, and as numbers and dates. What columns mean is not decided here."""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from io import BytesIO, StringIO
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
from pandas.api.types import is_bool_dtype, is_datetime64_any_dtype, is_numeric_dtype

from flsv.data.sources.places import TableRows
from flsv.utilities.declared import checked
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

    sep: str | None = None
    encoding: str = "utf-8-sig"
    decimal: Literal[".", ","] = "."
    thousands: Literal[".", ",", " ", "'"] | None = None
    date_format: str = "ISO8601"

    @property
    def has_plain_numbers(self) -> bool:
        """Whether numbers are written as pandas reads them."""
        return self.decimal == "." and self.thousands is None


class TextFile:
    """Text file of a table: its cells with numbers, and as they are written.

    It is read once for numbers and words, and again if texts of columns of numbers are asked for.

    Args:
        path: the file.
        file_format: how it is written.
        gaps: marks of missing values of the columns that are numbers. All others are read as texts. None: any column
            may be numbers.
    """

    def __init__(
        self,
        path: Path,
        file_format: FileFormat,
        gaps: Mapping[str, Sequence[str]] | None,
    ) -> None:
        self.path = path
        self._format = file_format
        data = self._load()
        if not data.strip():
            raise ConfigurationError(
                f"{path} is empty: expected a line with the columns' names, and rows of values."
            )
        self._separator = file_format.sep or self._frequent_separator(data)
        header = self._parse(data, header=None, nrows=1)
        self.names = header.iloc[0].str.strip().tolist()
        _check_distinct(self.names, str(path))
        self._check_rows(data)

        # Texts of numbers are looked at only where these may be something else.
        spaces = b'\t\r\n"+' + self._separator.encode()
        kinds = bytes.maketrans(b"23456789" + spaces, b"11111111" + b" " * len(spaces))
        kinds_of_characters = data.translate(kinds)
        leading_zeros = (b" 00", b" 01", b" -00", b" -01")
        has_leading_zeros = any(zero in kinds_of_characters for zero in leading_zeros)
        self.may_have_codes = has_leading_zeros or b"+" in data
        self.may_have_groups = b".111 " in kinds_of_characters.replace(b"0", b"1")

        #: Marks of missing values of the columns that were read as numbers.
        self.gaps: dict[str, tuple[str, ...]] = {}
        if file_format.has_plain_numbers:
            self.frame = self._with_numbers(data, gaps)
        else:
            self.frame = self.texts

    def _load(self) -> bytes:
        """Return the file's text in UTF-8."""
        data = self.path.read_bytes()
        encoding = self._format.encoding
        name = self.path.name
        if b"\0" in data and "16" not in encoding:
            raise ConfigurationError(
                f'{self.path} has zero bytes, as text in UTF-16 has: read: {{"{name}": {{"encoding": "utf-16"}}}}.'
            )
        try:
            text = data.decode(encoding)
            return f"{text}\n".encode()
        except (UnicodeError, LookupError) as error:
            raise ConfigurationError(
                f"{self.path} is not in {encoding}: {error}. Save it in UTF-8, or name its encoding, as cp1252 of "
                f'Excel in Western Europe: read: {{"{name}": {{"encoding": "cp1252"}}}}.'
            ) from error

    def _frequent_separator(self, data: bytes) -> str:
        header = data.lstrip(b"\r\n").splitlines()[0].decode()
        unquoted_parts = header.split('"')[::2]
        separators = "\t,;|" if self.path.suffix.lower() == ".tsv" else ",;\t|"
        return max(separators, key="".join(unquoted_parts).count)

    def _parse(self, data: bytes, **options: Any) -> pd.DataFrame:
        try:
            return pd.read_csv(
                BytesIO(data),
                sep=self._separator,
                keep_default_na=False,
                index_col=False,
                low_memory=False,
                **options,
            )
        except ValueError as error:
            raise ConfigurationError(
                f"{self.path} cannot be read as a table: {str(error).strip()}. Name its separator, such as "
                f'read: {{"{self.path.name}": {{"sep": ";"}}}}, and write quotation marks around cells that contain it.'
            ) from error

    def _check_rows(self, data: bytes) -> None:
        """Raise ConfigurationError if rows have other lengths than the header, or are the header again."""
        filled_lines = [line for line in data.splitlines() if line.strip()]
        header, *lines = [line.replace(b" ", b"") for line in filled_lines]
        separator = self._separator.encode()
        num_separators = {line.count(separator) for line in (header, *lines)}
        if b'"' in data or len(num_separators) > 1 or header in lines:
            self.lines  # noqa: B018  # where each row is looked at

    @cached_property
    def lines(self) -> np.ndarray:
        """Line in which each row ends, int64 ``[N]``."""
        lines = []
        csv.field_size_limit(_MAX_FIELD_LENGTH)
        text = StringIO(self._load().decode(), newline="")
        reader = csv.reader(text, delimiter=self._separator)
        rows = (row for row in reader if "".join(row).strip() or len(row) > 1)
        next(rows)
        for row in rows:
            line = f"{self.path}, line {reader.line_num}"
            if len(row) != len(self.names):
                raise ConfigurationError(
                    f"{line}: {len(row)} values, but the header has {len(self.names)} names. Write quotation marks "
                    f"around cells that contain {self._separator!r}."
                )
            may_be_header = row[0].strip() == self.names[0]
            if may_be_header and list(map(str.strip, row)) == self.names:
                raise ConfigurationError(f"{line}: the columns' names again. Remove this line.")
            lines.append(reader.line_num)
        return np.array(lines, dtype=np.int64)

    @cached_property
    def texts(self) -> pd.DataFrame:
        """Return all cells as they are written."""
        return self._parse(self._load(), names=self.names, header=0, dtype=object)

    def _with_numbers(
        self,
        data: bytes,
        gaps: Mapping[str, Sequence[str]] | None,
    ) -> pd.DataFrame:
        """Return the cells with numbers in columns that have nothing else but marks of gaps."""
        marks = gaps or dict.fromkeys(self.names, USUAL_GAPS)
        names_of_texts = [name for name in self.names if name not in marks]
        typed = self._parse(
            data,
            names=self.names,
            header=0,
            dtype=dict.fromkeys(names_of_texts, object),
            na_values={name: list(marks[name]) for name in self.names if name in marks},
        )
        columns = {}
        for name in self.names:
            columns[name] = typed[name]
            if is_numeric_dtype(typed[name]) and not is_bool_dtype(typed[name]):
                self.gaps[name] = tuple(marks[name])
            elif name in marks:
                columns[name] = self.texts[name]
        return pd.DataFrame(columns, copy=False)


@dataclass(frozen=True)
class Cells(TableRows):
    """A table's cells.

    Args:
        frame: the cells, indexed by the number of the row. Columns of a text file are numbers if all cells are numbers
            or marks of gaps.
        name: the table's name, or its client's.
        file_format: how numbers and dates are written.
        file: the text file, or None for a typed table.
        path: where the table is, for messages. Empty: its name.
    """

    frame: pd.DataFrame
    name: str = "the table"
    file_format: FileFormat = field(default_factory=FileFormat)
    file: TextFile | None = None
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
    def title(self) -> str:
        """Name of the table in messages."""
        return self.path or self.name

    def take(self, rows: np.ndarray) -> Cells:
        """Return only the rows at some positions."""
        return replace(self, frame=self.frame.iloc[rows])

    def lines(self) -> np.ndarray:
        """Return the line in which each row ends, or its number in a typed table, int64 ``[N]``."""
        row_numbers = self.frame.index.to_numpy()
        return row_numbers if self.file is None else self.file.lines[row_numbers]

    def where(self, rows: Sequence[int]) -> str:
        """Return text for messages that names rows by their lines."""
        lines = self.lines()[list(rows)].tolist()
        noun = "row" if self.file is None else "line"
        return f"{self.title}, {noun} {in_words(lines)}"

    def check_has(self, name: str, argument: str) -> None:
        """Raise ConfigurationError that mentions the user's argument if there is no such column."""
        if name not in self.frame:
            names = listed(self.frame, 20)
            raise ConfigurationError(
                f"{self.name} has no column {name!r} ({argument}). It has {names}.",
                without_data=f"its table has no column {name!r} ({argument})",
            )

    def texts(self, name: str) -> pd.Series:
        """Return a column's cells as they are written, or as they are in a typed table."""
        cells = self.frame[name]
        if self.file is None or name not in self.file.gaps:
            return cells
        return self.file.texts[name].iloc[self.frame.index]

    def words(self, name: str, argument: str = "the data dictionary") -> pd.Series:
        """Return a column's cells as a categorical of texts, NaN where a typed one is missing."""
        self.check_has(name, argument)
        if name not in self._words:
            self._words[name] = texts_of(self.texts(name))
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

    def are_read_as_gaps(self, name: str, marks: Sequence[str]) -> bool:
        """Return whether a column's numbers are NaN at these marks, and nowhere else."""
        return self.file is not None and self.file.gaps.get(name) == tuple(marks)

    def is_missing(self, name: str, marks: Sequence[str]) -> np.ndarray:
        """Return which of a column's cells have no value or one of the marks, bool ``[N]``."""
        if self.are_read_as_gaps(name, marks):
            return np.isnan(self.numbers(name))
        words = self.words(name)
        return (words.isna() | words.isin(marks)).to_numpy()


def read_cells(
    source: Any,
    name: str = "",
    file_format: FileFormat | None = None,
    gaps: Mapping[str, Sequence[str]] | None = None,
) -> Cells:
    """Read the cells of a text file with a header, a Parquet file or a DataFrame (pandas, polars, Arrow).

    ``gaps`` are those of :class:`TextFile`.
    """
    file_format = file_format or FileFormat()
    file = None
    if not isinstance(source, str | Path):
        name = name or type(source).__name__
        frame = source if isinstance(source, pd.DataFrame) else source.to_pandas()
    elif Path(source).suffix.lower() == ".parquet":
        frame = _read_parquet(Path(source))
    else:
        file = TextFile(Path(source), file_format, gaps)
        frame = file.frame

    table_name = name or str(source)
    column_names = [str(column).strip() for column in frame]
    _check_distinct(column_names, table_name)
    return Cells(
        frame=frame.set_axis(column_names, axis=1).reset_index(drop=True),
        name=table_name,
        file_format=file_format,
        file=file,
        path=str(source) if isinstance(source, str | Path) else "",
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
    if not is_numeric_dtype(cells):
        cells = _with_points(cells.astype(object), file_format, unit)
    numbers = pd.to_numeric(cells, errors="coerce")
    return numbers.to_numpy(dtype=float, na_value=np.nan)


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
