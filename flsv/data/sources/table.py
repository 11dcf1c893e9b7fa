"""Tables: comma-separated files, read strictly, and objects with named columns (pandas, polars, Arrow, Hugging Face).

Of the latter no library but pandas is needed: what has ``column_names`` or ``columns``, a length, and gives a column by
its name, is one of them.
"""

from __future__ import annotations

import csv
import difflib
import io
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from numbers import Number
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from pandas.api.types import infer_dtype, is_bool_dtype, is_numeric_dtype, is_string_dtype
from torch.utils.data import Dataset

from flsv.errors import ConfigurationError, in_words, listed

NUMBERS, CATEGORIES, TRUTH = "numbers", "categories", "truth values"
#: Endings of files.
TABLES = (".csv", ".tsv")
_LIMIT = threading.Lock()


def is_table_file(path: Any) -> bool:
    """Whether it is the path of a file of comma- or tab-separated values."""
    return isinstance(path, Path) and path.suffix.lower() in TABLES and path.is_file()


@dataclass(frozen=True)
class Table:
    """Rows with named columns.

    Args:
        path: the file, or what else the rows come from, for messages.
        frame: the columns; of a file all are text, of an object they are what they are there.
        lines: the line of the file in which each row ends, int ``[N]``, or its number in the object.
        typed: whether it is of an object, whose columns say what they hold.
    """

    path: Path | str
    frame: pd.DataFrame
    lines: np.ndarray
    typed: bool = False
    _texts: dict[str, np.ndarray] = field(default_factory=dict, repr=False, compare=False)

    def __len__(self) -> int:
        return len(self.frame)

    def places(self, rows: Sequence[int]) -> str:
        """Row numbers, in words.

        Example:
            >>> Table("wards.csv", pd.DataFrame(index=range(4)), np.array([2, 3, 4, 9])).places([0, 1, 2, 3])
            'line 2 .. 4, 9'
        """
        return f"{'row' if self.typed else 'line'} {in_words([int(self.lines[row]) for row in rows])}"

    def take(self, rows: np.ndarray) -> Table:
        """Some of the rows."""
        return replace(self, frame=self.frame.iloc[rows], lines=self.lines[rows], _texts={})

    def row_names(self, ids: Sequence[str], group: str | None) -> dict[str, list[str]]:
        """What tells each row for those who know the file: its line, whose it is, and columns that are no features.

        Args:
            ids: columns; one that there is not is left out.
            group: the column of whose a row is.

        Example:
            >>> frame = pd.DataFrame({"ward": ["A", "B"], "id": ["7", "9"]})
            >>> Table("wards.csv", frame, np.array([2, 3])).row_names(["id", "nr"], "ward")
            {'line': ['2', '3'], 'client': ['A', 'B'], 'id': ['7', '9']}
        """
        found = {"line": list(map(str, self.lines.tolist()))}
        columns = {"client": group, **{name: name for name in ids if name not in found}}
        there = {title: name for title, name in columns.items() if name in self.frame.columns}
        return {**found, **{title: self.frame[name].astype(str).tolist() for title, name in there.items()}}

    def column(self, name: str, argument: str) -> pd.Series:
        """A column.

        Args:
            name: of the column.
            argument: whose value ``name`` is, for the message.

        Raises:
            ConfigurationError: there is none of that name.
        """
        if name in self.frame:
            return self.frame[name]
        close = difflib.get_close_matches(name, self.frame.columns)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise ConfigurationError(f"{self.path} has no column {name!r} ({argument}).{hint} It has {self.shown}.")

    @property
    def shown(self) -> str:
        """The columns' names, for messages."""
        return listed(self.frame.columns, 20)

    def text(self, name: str, argument: str = "features") -> np.ndarray:
        """A column's values as text without white space around it, object ``[N]``; a gap is empty."""
        column = self.column(name, argument)
        if name not in self._texts:
            self._texts[name] = _words(column)
        return self._texts[name]

    def gaps(self, name: str, marks: Collection[str]) -> np.ndarray:
        """Which values are missing, bool ``[N]``: what an object calls missing, and what reads as one of ``marks``."""
        if self.has_numbers(name) and not set(marks) - {""}:
            return self.frame[name].isna().to_numpy()
        return pd.Index(self.text(name)).isin({"", *marks})

    def has_numbers(self, name: str) -> bool:
        """Whether a column is known to hold numbers, so that nothing has to be parsed."""
        dtype = self.frame[name].dtype
        return self.typed and is_numeric_dtype(dtype) and not is_bool_dtype(dtype)

    def numbers(self, name: str, truth: bool = False) -> np.ndarray:
        """A column as numbers, float64 ``[N]``; NaN where a value is none.

        Args:
            name: of the column.
            truth: whether it has truth values, which are 0 and 1.
        """
        if self.has_numbers(name):
            return self.frame[name].to_numpy(dtype=np.float64, na_value=np.nan)
        texts = self.text(name)
        return parsed([{"True": "1", "False": "0"}.get(text, text) for text in texts] if truth else texts)

    def kind(self, name: str) -> str | None:
        """What an object says of a column: numbers, categories, truth values, or else the types of its values; empty
        where there is no value. None of a file's column, of which there is nothing but the text.

        Example:
            >>> frame = {"a": [3, 0.5], "b": ["01234"] * 2, "c": [True, None], "d": [1, "1"], "e": [None] * 2}
            >>> table = frame_table(pd.DataFrame(frame, dtype=object))
            >>> [table.kind(name) for name in frame]
            ['numbers', 'categories', 'truth values', 'int, str', '']
        """
        if not self.typed:
            return None
        column = self.frame[name]
        if column.isna().all():
            return ""
        if isinstance(column.dtype, pd.CategoricalDtype):
            return CATEGORIES
        if column.dtype != object and is_numeric_dtype(column.dtype):
            return TRUTH if is_bool_dtype(column.dtype) else NUMBERS
        if is_string_dtype(column.dtype) and infer_dtype(column) == "string":
            return CATEGORIES
        types = {type(value) for value in column[column.notna()].tolist()}
        bases = ((bool | np.bool_, TRUTH), (Number | np.number, NUMBERS), (str, CATEGORIES))
        kinds = {next((kind for base, kind in bases if issubclass(each, base)), each.__name__) for each in types}
        return kinds.pop() if len(kinds) == 1 else ", ".join(sorted(each.__name__ for each in types))


def parsed(texts: Any) -> np.ndarray:
    """Texts as numbers, float64 ``[N]``; NaN where one is no finite number.

    Example:
        >>> parsed(["3", "-1e3", "high", "1_000", "inf"])
        array([    3., -1000.,    nan,    nan,    nan])
    """
    texts = np.asarray(texts, dtype=object)
    try:
        # Python reads 1_000 as a number, which nobody who writes a table means.
        numbers = texts.astype(np.float64) if "_" not in "".join(texts) else np.array([_number(each) for each in texts])
    except ValueError:
        numbers = np.array([_number(each) for each in texts])
    return np.where(np.isfinite(numbers), numbers, np.nan)


def _number(text: str) -> float:
    try:
        return float(text) if "_" not in text else np.nan
    except ValueError:
        return np.nan


def _words(column: pd.Series) -> np.ndarray:
    """Its values as text, object ``[N]``; a gap is empty."""
    if column.dtype == object and infer_dtype(column) != "string":
        return _as_words(column.isna().to_numpy(), column.tolist())
    # Of every different value once.
    places, values = pd.factorize(column)
    words = _as_words(np.append(np.zeros(len(values), bool), True), [*values.tolist(), None])
    return words[places]  # a gap's place is -1


def _as_words(missing: np.ndarray, values: list[Any]) -> np.ndarray:
    """Without white space around them; whole numbers without a point, which columns with gaps give them."""
    floats = [value for value, gap in zip(values, missing) if isinstance(value, float) and not gap]
    whole = all(value.is_integer() for value in floats if np.isfinite(value))

    def word(value: Any) -> str:
        value = int(value) if whole and isinstance(value, float) and np.isfinite(value) else value
        return str(value).strip()

    return np.array(["" if gap else word(value) for value, gap in zip(values, missing)], dtype=object)


def find_place(name: str | Path, root: str) -> Path | None:
    """The path of a file or a folder: below ``root``, or as given; None if there is none."""
    return next((place for place in (Path(root) / name, Path(name)) if str(name) and place.exists()), None)


def looked_at(name: str, root: str) -> str:
    """Where :func:`find_place` looks, for messages."""
    return " and ".join(dict.fromkeys(str(place.absolute()) for place in (Path(root) / name, Path(name))))


def find_file(path: str, root: str) -> Path:
    """The file, looked up below ``root``, then as it is.

    Raises:
        ConfigurationError: there is none in either place.
    """
    for place in (Path(root) / path, Path(path)):
        if place.is_file():
            return place
    raise ConfigurationError(
        f"{path} was not found: looked at {looked_at(path, root)}. Give root the folder that holds it."
    )


def read_csv(path: Path, delimiter: str = ",") -> Table:
    """A file with a header line, in UTF-8 with or without a byte order mark; quoted values may span lines.

    By Python's reader: that of pandas fills up rows that are too short, takes what follows a quote, and does not tell
    in which line a row is.

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
        ...     read_csv(path).text("note")
        array(['slept, then ate', ''], dtype=object)
    """
    if len(delimiter) != 1:
        raise ConfigurationError(f"delimiter={delimiter!r}: expected one character, such as ',' or ';'.")
    rows, lines = [], []
    try:
        text = path.read_bytes().decode("utf-8-sig")
        if (zero := text.find("\0")) >= 0:
            place = text.count("\n", 0, zero) + 1
            raise csv.Error(f"line {place} has a zero byte, as a damaged file or UTF-16 has")
        with _long_values():
            reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
            header = next(reader, None)
            for row in reader:
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
    return Table(path, pd.DataFrame(rows, columns=names, dtype=object), np.array(lines))


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


def column_keys(frame: Any) -> dict[str, Any] | None:
    """The keys of an object's columns by name; None if it has no columns.

    Raises:
        ConfigurationError: two columns of one name.

    Example:
        >>> column_keys([1, 2]) is None
        True
    """
    if isinstance(frame, Dataset | Mapping | type) or not hasattr(frame, "__getitem__"):
        return None
    names = getattr(frame, "column_names", None)
    names = getattr(frame, "columns", None) if names is None else names
    if names is None or callable(names) or not hasattr(frame, "__len__"):
        return None
    keys = {str(name).strip(): name for name in names}
    if len(keys) < len(names):
        twice = sorted({str(name) for name in names if sum(str(other) == str(name) for other in names) > 1})
        raise ConfigurationError(
            f"{type(frame).__name__}: several columns are called {twice[0] if twice else names!r}."
        )
    return keys


def is_columnar(frame: Any) -> bool:
    """Whether it has named columns."""
    return column_keys(frame) is not None


def is_hugging_face(frame: Any) -> bool:
    """Whether it is a data set of the library ``datasets``: rows by number, columns by name, ``features``."""
    return is_columnar(frame) and isinstance(getattr(frame, "features", None), Mapping)


def column_values(frame: Any, key: Any) -> list[Any]:
    """The values of a column, for any library of tables."""
    column = frame[key]
    for name in ("to_list", "tolist", "to_pylist"):
        if hasattr(column, name):
            return list(getattr(column, name)())
    return list(column)


def frame_table(frame: Any, leave_out: tuple[str, ...] = ()) -> Table:
    """An object's columns as they are; numbers of classes that have names are these names, -1 a gap.

    Args:
        frame: has columns of numbers, words and truth values.
        leave_out: names of columns that are there and not read, such as pictures.

    Example:
        >>> class Frame:
        ...     columns = ("ward", "age")
        ...     def __len__(self):
        ...         return 2
        ...     def __getitem__(self, name):
        ...         return {"ward": ["07", None], "age": [30.0, float("nan")]}[name]
        >>> table = frame_table(Frame())
        >>> {name: (table.kind(name), table.text(name).tolist()) for name in table.frame}
        {'ward': ('categories', ['07', '']), 'age': ('numbers', ['30', ''])}
    """
    rows = range(len(frame))
    columns = {
        name: pd.Series(None, index=rows, dtype=object) if name in leave_out else _series(frame, key).set_axis(rows)
        for name, key in (column_keys(frame) or {}).items()
    }
    return Table(type(frame).__name__, pd.DataFrame(columns, index=rows), np.arange(len(rows)), typed=True)


def _series(frame: Any, key: Any) -> pd.Series:
    found = frame[key]
    classes = getattr(frame.features.get(key), "names", None) if is_hugging_face(frame) else None
    if isinstance(found, pd.Series) and classes is None:
        return found
    # Tensors and arrays of no dimension, as Hugging Face's formats give them, are their numbers.
    values = [value.item() if getattr(value, "ndim", None) == 0 else value for value in column_values(frame, key)]
    if classes is not None:
        values = [None if value is None or value == -1 else classes[int(value)] for value in values]
    kind = str(getattr(found, "dtype", getattr(found, "type", ""))).lower()
    # polars and Arrow say by other words than pandas that a column has categories.
    categories = kind.startswith(("category", "categorical", "enum", "dictionary"))
    filled = pd.Series(np.fromiter(values, dtype=object, count=len(values)), dtype=object)
    return filled.astype("category") if categories else filled
