"""Tables: their fields as they are written, and as numbers and dates. What columns mean is not decided here."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from io import StringIO
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import pandas as pd
from pandas.api.types import is_complex_dtype, is_datetime64_any_dtype, is_numeric_dtype

from flsv.data.column_texts import texts_of
from flsv.data.labels import declared_order
from flsv.data.sources.places import TableRows
from flsv.utilities.declared import Rules, checked
from flsv.utilities.errors import ConfigurationError, in_words, listed

#: Texts that mean a missing value, unless the data dictionary names others for a column.
USUAL_GAPS = ("", "NA", "N/A", "NaN", "nan", "null", ".", "?")
#: Largest absolute value of a number: float32 is infinite beyond it.
LARGEST_NUMBER = 3e38
#: Characters that may separate thousands if the separator is a space.
_SPACES = " \u00a0\u202f"
_MAX_FIELD_LENGTH = 2**31 - 1


def _are_texts(new_texts: Any) -> bool:
    """Return whether an argument is a mapping of texts to texts."""
    if not isinstance(new_texts, Mapping):
        return False
    return all(isinstance(text, str) for text in (*new_texts, *new_texts.values()))


def _are_mappings_of_texts(mappings: Any) -> bool:
    return isinstance(mappings, Mapping) and all(map(_are_texts, mappings.values()))


@checked
@dataclass(frozen=True)
class FileFormat:
    """How a client's table is written. The first arguments are those of text files, with names of ``pandas.read_csv``.

    Args:
        sep: field separator. None: the comma, semicolon, tab or vertical bar, whichever is most frequent in the header.
        encoding: encoding of the text.
        decimal: decimal mark.
        thousands: thousands separator, or None.
        date_format: format of dates, as for ``strftime``.
        rename: new names of columns, ``{name in the table: name in the dictionary}``. The target is a column, too.
        recode: new words of columns, ``{name in the dictionary: {word in the table: new word}}``. Other words stay.
    """

    rules: ClassVar[Rules] = (
        (lambda a: a.sep is None or len(a.sep) == 1, "sep={sep!r}: expected one character."),
        (
            lambda a: a.rename is None or _are_texts(a.rename),
            "rename={rename}: expected {{name: new name}}. Write texts in quotation marks.",
        ),
        (
            lambda a: a.recode is None or _are_mappings_of_texts(a.recode),
            "recode={recode}: expected {{column: {{word: new word}}}}. Write texts in quotation marks.",
        ),
    )

    sep: str | None = None
    encoding: str = "utf-8-sig"
    decimal: Literal[".", ","] = "."
    thousands: Literal[".", ",", " ", "'"] | None = None
    date_format: str = "ISO8601"
    rename: Mapping[str, str] | None = None
    recode: Mapping[str, Mapping[str, str]] | None = None


def read_text_file(path: Path, file_format: FileFormat) -> tuple[pd.DataFrame, np.ndarray]:
    """Return the fields of a text file as they are written, and the line in which each row ends, int64 ``[N]``."""
    text = _text_of(path, file_format.encoding)
    separator = file_format.sep or _frequent_separator(text)
    csv.field_size_limit(_MAX_FIELD_LENGTH)
    reader = csv.reader(StringIO(text, newline=""), delimiter=separator)
    names: list[str] = []
    rows = []
    lines = []
    for fields in reader:
        stripped_fields = [field.strip() for field in fields]
        if stripped_fields in ([], [""]):  # an empty line
            continue
        if not names:
            names = stripped_fields
            continue
        _check_row(path, reader.line_num, stripped_fields, names, separator)
        rows.append(fields)
        lines.append(reader.line_num)
    frame = pd.DataFrame(rows, columns=names, dtype=object)
    return frame, np.array(lines, dtype=np.int64)


def _check_row(
    path: Path,
    line: int,
    stripped_fields: list[str],
    names: list[str],
    separator: str,
) -> None:
    if len(stripped_fields) != len(names):
        raise ConfigurationError(
            f"{path}, line {line}: the row has {len(stripped_fields)} fields, but the header has {len(names)} names. "
            f"Put fields that contain {separator!r} in quotation marks, or name the field separator in the data "
            f'dictionary, such as read: {{"{path.name}": {{"sep": ";"}}}}.'
        )
    if stripped_fields == names:
        raise ConfigurationError(f"{path}, line {line}: the header is repeated. Remove this line.")


def _text_of(path: Path, encoding: str) -> str:
    try:
        text = path.read_bytes().decode(encoding)
    except (UnicodeError, LookupError) as error:
        raise ConfigurationError(
            f"{path} cannot be decoded as {encoding}: {error}. Save it in UTF-8, or name its encoding in the data "
            f'dictionary. Excel in Western Europe writes cp1252: read: {{"{path.name}": {{"encoding": "cp1252"}}}}.'
        ) from error
    if not text.strip():
        raise ConfigurationError(
            f"{path} is empty, but a header with the columns' names and rows of values were expected."
        )
    return text


def _frequent_separator(text: str) -> str:
    header = text.lstrip("\r\n").splitlines()[0]
    unquoted_parts = header.split('"')[::2]
    return max(",;\t|", key="".join(unquoted_parts).count)


@dataclass(frozen=True)
class Table(TableRows):
    """A table with the format in which it was written.

    Args:
        frame: the fields, indexed by the number of the row. The fields of a text file are texts.
        name: the table's name, or its client's.
        file_format: how numbers and dates are written.
        row_lines: the line of a text file in which each of its rows ends, int64 ``[N]``. None: a DataFrame or a Parquet
            file, whose columns have types.
        path: the file's path, for messages. Empty: no file.
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

    def take(self, rows: np.ndarray) -> Table:
        """Return only the rows at some positions."""
        return replace(self, frame=self.frame.iloc[rows])

    def lines(self) -> np.ndarray:
        """Return the line in which each row of a text file ends, or each row's number, int64 ``[N]``."""
        row_numbers = self.frame.index.to_numpy()
        return row_numbers if self.row_lines is None else self.row_lines[row_numbers]

    def where(self, rows: Sequence[int]) -> str:
        """Return the file and the lines of some rows, for messages."""
        lines = self.lines()[list(rows)].tolist()
        noun = "line" if self.is_text_file else "row"
        return f"{self.title}, {noun} {in_words(lines)}"

    def check_has(self, name: str, argument: str) -> None:
        """Raise ConfigurationError if there is no column ``name``, which is named in ``argument``."""
        if name not in self.frame:
            names = listed(self.frame, 20)
            raise ConfigurationError(
                f"{self.name} has no column {name!r}, which is named in {argument}. Its columns are {names}.",
                without_data=f"its table has no column {name!r}, which is named in {argument}",
            )

    def declared_order(self, name: str) -> tuple[str, ...]:
        """Return the texts of a column's categories in their order. Empty for a column without categories."""
        dtype = self.frame[name].dtype
        if not isinstance(dtype, pd.CategoricalDtype):
            return ()
        categories = texts_of(pd.Series(dtype.categories))
        return declared_order(list(categories.cat.categories), is_ordered=bool(dtype.ordered))

    def words(self, name: str, argument: str = "the data dictionary") -> pd.Series:
        """Return a column as a categorical of texts, with NaN for None and NaN in a DataFrame."""
        self.check_has(name, argument)
        if name not in self._words:
            self._words[name] = texts_of(self.frame[name])
        return self._words[name]

    def numbers(self, name: str, unit: str = "") -> np.ndarray:
        """Return a column as numbers, float64 ``[N]``, with NaN for fields that are not numbers in the table's format.

        ``unit`` may follow each number.
        """
        key = (name, unit)
        if key not in self._numbers:
            self._numbers[key] = numbers_of(self.frame[name], self.file_format, unit)
        return self._numbers[key]

    def is_missing(self, name: str, marks: Sequence[str]) -> np.ndarray:
        """Return which of a column's fields have no value or one of the texts ``marks``, bool ``[N]``."""
        words = self.words(name)
        return (words.isna() | words.isin(marks)).to_numpy()


def open_table(
    source: Any,
    file_format: FileFormat | None = None,
) -> Table:
    """Read a text file with a header, a Parquet file or a DataFrame (pandas, polars, Arrow)."""
    file_format = file_format or FileFormat()
    is_file = isinstance(source, str | Path)
    name = str(source) if is_file else type(source).__name__
    frame, row_lines = _frame_and_lines(source, file_format)
    rename = file_format.rename or {}
    recode = file_format.recode or {}
    column_names = [str(column).strip() for column in frame]
    _check_has_all(rename, column_names, name, option="rename")
    column_names = [rename.get(column, column) for column in column_names]
    _check_distinct(column_names, name)
    _check_has_all(recode, column_names, name, option="recode")
    frame = frame.set_axis(column_names, axis=1).reset_index(drop=True)
    return Table(
        frame=_recoded(_with_numpy_types(frame), recode),
        name=name,
        file_format=file_format,
        row_lines=row_lines,
        path=name if is_file else "",
    )


def _frame_and_lines(
    source: Any, file_format: FileFormat
) -> tuple[pd.DataFrame, np.ndarray | None]:
    """Return the columns and, of a text file, the line in which each row ends."""
    if isinstance(source, pd.DataFrame):
        return source, None
    if not isinstance(source, str | Path):
        return source.to_pandas(), None
    path = Path(source)
    if path.suffix.lower() == ".parquet":
        return _read_parquet(path), None
    return read_text_file(path, file_format)


def _with_numpy_types(frame: pd.DataFrame) -> pd.DataFrame:
    """Convert columns of Arrow's types to the types that pandas has for Arrow tables."""
    arrow_names = [name for name in frame if isinstance(frame[name].dtype, pd.ArrowDtype)]
    if not arrow_names:
        return frame
    import pyarrow  # installed, since there are columns of its types

    arrow_table = pyarrow.Table.from_pandas(frame[arrow_names], preserve_index=False)
    columns = arrow_table.to_pandas(ignore_metadata=True)
    return frame.assign(**dict(columns.items()))


def _recoded(frame: pd.DataFrame, recode: Mapping[str, Mapping[str, str]]) -> pd.DataFrame:
    """Return the table with other words in some columns, which become columns of texts."""
    columns = {name: _recoded_column(frame[name], words) for name, words in recode.items()}
    return frame.assign(**columns)


def _recoded_column(column: pd.Series, new_words: Mapping[str, str]) -> pd.Series:
    def new_word(word: Any) -> Any:
        return new_words.get(word, word)

    words = texts_of(column).astype(object).map(new_word)
    if not isinstance(column.dtype, pd.CategoricalDtype):
        return words
    categories = texts_of(pd.Series(column.dtype.categories)).cat.categories
    new_categories = list(dict.fromkeys(map(new_word, categories)))  # in the same order
    return words.astype(pd.CategoricalDtype(new_categories, ordered=column.dtype.ordered))


def _check_has_all(names: Iterable[str], columns: Sequence[str], table: str, option: str) -> None:
    missing_names = [name for name in names if name not in columns]
    if missing_names:
        raise ConfigurationError(
            f"{table} has no column {listed(missing_names, show=repr)}, which is named in {option} of the data "
            f"dictionary (read). Its columns are {listed(columns, 20)}.",
            without_data=f"its table has no column {listed(missing_names, show=repr)}, which is named in {option}",
        )


def _check_distinct(names: Sequence[str], table_name: str) -> None:
    invalid_names = [name for name in names if not name or names.count(name) > 1]
    if invalid_names:
        raise ConfigurationError(
            f"{table_name} has columns with the names {listed(invalid_names, show=repr)}. Give each column a name of "
            "its own."
        )


def _read_parquet(path: Path) -> pd.DataFrame:
    try:
        return pd.read_parquet(path, engine="pyarrow")
    except (ValueError, OSError) as error:  # pyarrow's errors are subclasses
        raise ConfigurationError(f"{path} cannot be read as a Parquet file: {error}") from error


def numbers_of(column: pd.Series, file_format: FileFormat, unit: str = "") -> np.ndarray:
    """Return a column as numbers, float64 ``[N]``, with NaN for what is not a number in the file's format.

    ``unit`` may follow each number.
    """
    if is_complex_dtype(column):
        return np.full(len(column), np.nan)
    if is_numeric_dtype(column):
        return column.to_numpy(dtype=float, na_value=np.nan)
    value_of_row, distinct_values = pd.factorize(column)  # -1 for a missing value
    texts = pd.Series(distinct_values, dtype=object)
    if unit or file_format.decimal != "." or file_format.thousands is not None:
        texts = _with_points(texts, file_format, unit)
    parsed_texts = pd.to_numeric(texts, errors="coerce")
    numbers = parsed_texts.to_numpy(dtype=float, na_value=np.nan)
    numbers_and_missing = np.append(numbers, np.nan)  # the last is that of -1
    numbers_and_missing[np.isinf(numbers_and_missing)] = np.nan
    return numbers_and_missing[value_of_row]


def _with_points(texts: pd.Series, file_format: FileFormat, unit: str) -> pd.Series:
    """Write numbers with decimal points and without separators or unit, and all other texts as None."""
    decimal = f"[{file_format.decimal}]"
    thousands = file_format.thousands
    groups = ""
    if thousands:
        mark = f"[{_SPACES}]" if thousands == " " else f"[{thousands}]"
        groups = rf"|\d{{1,3}}({mark}\d{{3}})+"  # 1,234,567
    # Only Python reads 1_000, 0x10 and infinity as numbers, so this pattern does not match them.
    number = rf"((\d+{groups})({decimal}\d*)?|{decimal}\d+)"
    unit_pattern = rf"({re.escape(unit)})?\s*"
    # NaN for values that are not texts, which stay as they are.
    is_number = texts.str.fullmatch(rf"\s*[-+]?{number}([eE][-+]?\d+)?\s*{unit_pattern}")
    plain_texts = texts
    if unit:
        plain_texts = plain_texts.str.replace(rf"{unit_pattern}$", "", regex=True)
    if thousands:
        plain_texts = plain_texts.str.replace(mark, "", regex=True)
    plain_texts = plain_texts.str.replace(file_format.decimal, ".")
    other_values = texts.where(is_number.isna())  # NaN in place of texts without a number
    return plain_texts.where(is_number == True, other_values)  # noqa: E712


def dates_of(column: pd.Series, file_format: FileFormat) -> pd.Series:
    """Return a column as dates in UTC, with NaT for what is not a date in the file's format."""
    if not is_datetime64_any_dtype(column):
        # Before pandas 3, dates of a categorical may be a categorical, which cannot be subtracted.
        column = texts_of(column).astype(object)
    return pd.to_datetime(column, format=file_format.date_format, errors="coerce", utc=True)


def format_of(
    formats: Mapping[str, FileFormat],
    client: str,
    source: Any,
) -> FileFormat:
    """Return the format of a client's file, by the client's name, the file's name, or ``"*"``."""
    names = [client]
    if isinstance(source, str | Path):
        names += [Path(source).name, Path(source).stem]
    for name in [*names, "*"]:
        if name in formats:
            return formats[name]
    return FileFormat()
