"""Cells of tables, as they are written, and as numbers and dates. What columns mean is not decided here."""

from __future__ import annotations

import codecs
import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
from lightning.pytorch.utilities import rank_zero_info
from pandas.api.types import is_datetime64_any_dtype, is_numeric_dtype

from flsv.data.sources.places import TableRows
from flsv.utilities.declared import checked
from flsv.utilities.errors import ConfigurationError, in_words, listed

#: Marks of missing values, unless a column has others.
USUAL_GAPS = ("", "NA", "N/A", "NaN", "nan", "null", ".", "?")
#: Number of bytes of a file that takes seconds to read.
LARGE_FILE_BYTES = 4_000_000
#: Largest size of numbers to read: beyond it float32 is infinite.
LARGEST_NUMBER = 3e38
#: Spaces between groups of three digits.
_SPACES = " \u00a0\u202f"
_MAX_FIELD_LENGTH = 2**31 - 1


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


@dataclass(frozen=True)
class Cells(TableRows):
    """A table's cells.

    Args:
        frame: the cells, indexed by the number of the row. Columns of a text file are numbers if all cells are numbers
            or marks of gaps.
        texts: the cells as they are written. Of a typed table the same as ``frame``.
        name: the table's name for messages.
        file_format: how numbers and dates are written.
        path: the text file, or None for a typed table.
    """

    frame: pd.DataFrame
    texts: pd.DataFrame
    name: str = "the table"
    file_format: FileFormat = field(default_factory=FileFormat)
    path: Path | None = None
    _words: dict[str, pd.Series] = field(
        default_factory=dict,
        init=False,
        repr=False,
    )
    _numbers: dict[str, np.ndarray] = field(
        default_factory=dict,
        init=False,
        repr=False,
    )

    def __len__(self) -> int:
        return len(self.frame)

    def take(self, rows: np.ndarray) -> Cells:
        """Return only the rows at some positions."""
        frame = self.frame.iloc[rows]
        texts = self.texts.iloc[rows]
        return replace(self, frame=frame, texts=texts)

    def lines(self) -> np.ndarray:
        """Return the line in which each row ends, or its number in a typed table, int64 ``[N]``."""
        row_numbers = self.frame.index.to_numpy()
        if self.path is None:
            return row_numbers
        return _line_of_each_row(self.path, self.file_format)[row_numbers]

    def where(self, rows: Sequence[int]) -> str:
        """Return text for messages that names rows by their lines."""
        lines = self.lines()[list(rows)].tolist()
        if self.path is None:
            return f"{self.name}, row {in_words(lines)}"
        return f"{self.path}, line {in_words(lines)}"

    def check_has(self, name: str, argument: str) -> None:
        """Raise ConfigurationError that mentions the user's argument if there is no such column."""
        if name not in self.frame:
            names = listed(self.frame, 20)
            raise ConfigurationError(
                f"{self.path or self.name} has no column {name!r} ({argument}). It has {names}."
            )

    def words(self, name: str, argument: str = "the data dictionary") -> pd.Series:
        """Return a column's cells as texts, NaN where a typed one is missing."""
        self.check_has(name, argument)
        if name not in self._words:
            self._words[name] = texts_of(self.texts[name])
        return self._words[name]

    def numbers(self, name: str) -> np.ndarray:
        """Return a column's cells as numbers, float64 ``[N]``, NaN for what is none in the table's notation."""
        if name not in self._numbers:
            typed_cells = self.frame[name]
            self._numbers[name] = numbers_of(typed_cells, self.file_format)
        return self._numbers[name]


def read_cells(
    source: Any,
    name: str = "",
    file_format: FileFormat | None = None,
) -> Cells:
    """Read the cells of a text file with a header, a Parquet file or a DataFrame (pandas, polars, Arrow)."""
    file_format = file_format or FileFormat()
    path = None
    if not isinstance(source, str | Path):
        name = name or type(source).__name__
        frame = source if isinstance(source, pd.DataFrame) else source.to_pandas()
    elif Path(source).suffix.lower() == ".parquet":
        frame = _read_parquet(Path(source))
    else:
        path = Path(source)
        frame = _read_text(path, file_format)

    table_name = name or str(source)
    column_names = [str(column).strip() for column in frame]
    _check_distinct(column_names, table_name)
    texts = frame.set_axis(column_names, axis=1).reset_index(drop=True)

    typed_cells = texts
    if path is not None and file_format.has_plain_numbers:
        typed_cells = _with_numbers(texts, path, file_format)
    return Cells(
        frame=typed_cells,
        texts=texts,
        name=table_name,
        file_format=file_format,
        path=path,
    )


def _check_distinct(names: Sequence[str], table_name: str) -> None:
    """Raise ConfigurationError if columns have no name, or the same one."""
    are_distinct = len({*names, ""}) > len(names)
    if are_distinct:
        return

    invalid_names = []
    for name in names:
        if not name or names.count(name) > 1:
            invalid_names.append(name)
    raise ConfigurationError(
        f"{table_name}: columns are called {listed(invalid_names, show=repr)}. Each column needs a name of its own."
    )


def _read_parquet(path: Path) -> pd.DataFrame:
    try:
        return pd.read_parquet(path, engine="pyarrow")
    except (ValueError, OSError) as error:  # pyarrow's errors are subclasses
        raise ConfigurationError(f"{path} cannot be read as a Parquet file: {error}") from error


def _separator(path: Path, file_format: FileFormat) -> str:
    if file_format.sep is not None:
        return file_format.sep
    with path.open(encoding=file_format.encoding, newline="") as file:
        header = file.readline()
    unquoted_parts = header.split('"')[::2]
    separators = "\t,;|" if path.suffix.lower() == ".tsv" else ",;\t|"
    return max(separators, key="".join(unquoted_parts).count)


def _read_text(path: Path, file_format: FileFormat) -> pd.DataFrame:
    """Read all cells as they are written. Refuse rows of other lengths, and names that stand there twice."""
    data = path.read_bytes()
    if len(data) >= LARGE_FILE_BYTES:
        rank_zero_info(
            f"flsv: reading {path} ({len(data) / 1e6:.0f} MB), a second for some ten megabytes."
        )
    if not data.strip():
        raise ConfigurationError(
            f"{path} is empty: expected a line with the columns' names, and rows of values."
        )

    has_mark = data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    is_utf_16 = has_mark or b"\0" in data
    if is_utf_16 and "16" not in file_format.encoding:
        raise ConfigurationError(
            f'{path} has zero bytes, as text in UTF-16 has: read: {{"{path.name}": {{"encoding": "utf-16"}}}}.'
        )

    try:
        separator = _separator(path, file_format)
        rows = pd.read_csv(
            path,
            sep=separator,
            encoding=file_format.encoding,
            header=None,
            dtype=object,
            keep_default_na=False,
            low_memory=False,
        )
    except UnicodeError as error:
        raise ConfigurationError(
            f"{path} is not in {file_format.encoding}: {error}. Save it in UTF-8, or name its encoding, as cp1252 of "
            f'Excel in Western Europe: read: {{"{path.name}": {{"encoding": "cp1252"}}}}.'
        ) from error
    except (ValueError, LookupError) as error:
        raise ConfigurationError(
            f"{path} cannot be read as a table: {str(error).strip()}. Name its separator, such as "
            f'read: {{"{path.name}": {{"sep": ";"}}}}, and write quotation marks around cells that contain it.'
        ) from error

    # pandas fills rows that end too early. They have too few separators, but for those within quotation marks.
    num_separators = data.count(separator.encode())
    if is_utf_16 or b'"' in data or num_separators != rows.size - len(rows):
        _line_of_each_row(path, file_format)

    names = rows.iloc[0].str.strip()
    rows = rows.iloc[1:]
    has_first_name = rows[0].str.strip() == names[0]
    candidates = rows[has_first_name]
    stripped_candidates = candidates.apply(lambda cells: cells.str.strip())
    has_all_names = (stripped_candidates == names).all(axis=1)
    if has_all_names.any():
        row = candidates.index[0] - 1
        line = _line_of_each_row(path, file_format)[row]
        raise ConfigurationError(
            f"{path}, line {line}: the columns' names again. Remove this line."
        )
    return rows.set_axis(names, axis=1)


def _with_numbers(
    texts: pd.DataFrame,
    path: Path,
    file_format: FileFormat,
) -> pd.DataFrame:
    """Return the cells with numbers in columns that have nothing else but marks of gaps."""
    typed = pd.read_csv(
        path,
        sep=_separator(path, file_format),
        encoding=file_format.encoding,
        names=list(texts),
        header=0,
        index_col=False,
        na_values=USUAL_GAPS,
        keep_default_na=False,
        low_memory=False,
    )
    numbers = typed.select_dtypes("number")
    columns = {}
    for name in texts:
        columns[name] = numbers.get(name, texts[name])
    return pd.DataFrame(columns, copy=False)


def _line_of_each_row(path: Path, file_format: FileFormat) -> np.ndarray:
    """Return the line in which each row ends, int64 ``[N]``. Raise ConfigurationError if a row has too few cells."""
    lines = []
    separator = _separator(path, file_format)
    csv.field_size_limit(_MAX_FIELD_LENGTH)
    with path.open(encoding=file_format.encoding, newline="") as file:
        reader = csv.reader(file, delimiter=separator)
        rows = filter(None, reader)
        names = next(rows)
        for row in rows:
            if len(row) != len(names):
                raise ConfigurationError(
                    f"{path}, line {reader.line_num}: {len(row)} values, but the header has {len(names)} names. "
                    f"Write quotation marks around cells that contain {separator!r}."
                )
            lines.append(reader.line_num)
    return np.array(lines, dtype=np.int64)


def texts_of(cells: pd.Series) -> pd.Series:
    """Return cells as texts, NaN where a typed one is missing.

    Numbers that are whole get no point, unless the column has fractions: a gap gives 7 a fraction, and 7.0 is a version
    beside 7.5.
    """
    number_of_cell, distinct_cells = pd.factorize(cells)  # -1 for what is missing
    texts: list[Any] = []
    for cell in distinct_cells:
        texts.append(str(cell).strip())

    are_versions = any(_has_fraction(text) for text in texts)
    if not are_versions:
        texts = [_without_point_zero(text) for text in texts]

    texts.append(np.nan)
    values = np.array(texts, dtype=object)[number_of_cell]
    return pd.Series(values, index=cells.index, dtype=object)


def _has_fraction(text: str) -> bool:
    whole, point, fraction = text.partition(".")
    digits = whole.removeprefix("-")
    is_number = bool(point) and digits.isdigit() and fraction.isdigit()
    return is_number and fraction != "0"


def _without_point_zero(text: str) -> str:
    whole = text.removesuffix(".0")
    return whole if whole.removeprefix("-").isdigit() else text


def numbers_of(cells: pd.Series, file_format: FileFormat) -> np.ndarray:
    """Return numbers, float64 ``[N]``, NaN for what is none in the file's notation."""
    if not is_numeric_dtype(cells):
        cells = _with_points(cells.astype(object), file_format)
    numbers = pd.to_numeric(cells, errors="coerce")
    return numbers.to_numpy(dtype=float, na_value=np.nan)


def _with_points(texts: pd.Series, file_format: FileFormat) -> pd.Series:
    """Write numbers with decimal points and without separators, and all else as None."""
    decimal = file_format.decimal
    thousands = file_format.thousands
    # What Python alone reads as numbers is none: 1_000, 0x10, infinity.
    is_text = np.array([isinstance(text, str) for text in texts], dtype=bool)
    if file_format.has_plain_numbers:
        is_number = texts.str.fullmatch(r"\s*[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?\s*")
        return texts.where(~is_text | (is_number == True))  # noqa: E712  # NaN for what is no text

    mark = f"[{_SPACES}]" if thousands == " " else f"[{thousands}]"
    groups = rf"|\d{{1,3}}({mark}\d{{3}})+" if thousands else ""
    is_number = texts.str.fullmatch(rf"\s*[-+]?(\d+{groups})([{decimal}]\d+)?([eE][-+]?\d+)?\s*")
    if thousands:
        texts = texts.str.replace(mark, "", regex=True)
    return texts.str.replace(decimal, ".").where(is_number == True)  # noqa: E712  # as above


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
