"""Tables: comma-separated files, read strictly, and objects with named columns.

None of the libraries of these is needed: what has ``column_names`` or ``columns``, a length, and gives a column by its
name, is one of them.
"""

from __future__ import annotations

import csv
import difflib
import math
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from numbers import Number
from pathlib import Path
from typing import Any

from torch.utils.data import Dataset

from flsv.data.labels import in_words
from flsv.errors import ConfigurationError

NUMBERS, CATEGORIES, TRUTH = "numbers", "categories", "truth values"
#: Endings of files.
TABLES = (".csv", ".tsv")
_LIMIT = threading.Lock()


@dataclass(frozen=True)
class CSVFile:
    """A file's columns, as text; or those of an object that has columns.

    Args:
        path: the file, or what else the rows come from, for messages.
        columns: values by column name, ``N`` each.
        lines: the line of the file in which each row ends, ``N``.
        unit: what ``lines`` counts: lines of a file, or the rows of an object.
        kinds: of an object with columns, what :func:`~flsv.data.tables.values.kind_of` says of the values that they
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
        """Row numbers, in words.

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
    return _values(frame[key])


def frame_table(frame: Any, leave_out: tuple[str, ...] = ()) -> CSVFile:
    """An object's columns as those of a CSV file, and of what kind their values are, which their text does not tell.

    A gap (``None``, NaN) is an empty text. Numbers of classes that have names are these names, -1 a gap.

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
        >>> table.columns, table.kinds
        ({'ward': ['07', ''], 'age': ['30', '']}, {'ward': 'categories', 'age': 'numbers'})
    """
    columns: dict[str, list[str]] = {}
    kinds: dict[str, str] = {}
    for name, key in (column_keys(frame) or {}).items():
        if name in leave_out:
            columns[name], kinds[name] = [""] * len(frame), ""
            continue
        found = frame[key]
        values = [_plain(value) for value in _values(found)]
        if (classes := _class_names(frame, key)) is not None:
            values = [None if value is None or value == -1 else classes[int(value)] for value in values]
        kinds[name] = CATEGORIES if _is_categorical(found) else kind_of(value for value in values if value is not None)
        # Whole numbers come as 3.0 out of a column that has gaps, or of integers that were read as floats.
        whole = all(value.is_integer() for value in values if isinstance(value, float) and math.isfinite(value))
        columns[name] = [_text(value, whole) for value in values]
    return CSVFile(type(frame).__name__, columns, list(range(len(frame))), unit="row", kinds=kinds)


def _values(column: Any) -> list[Any]:
    for name in ("to_list", "tolist", "to_pylist"):
        if hasattr(column, name):
            return list(getattr(column, name)())
    return list(column)


def _plain(value: Any) -> Any:
    """A value as Python has it; None for a gap."""
    if hasattr(value, "item") and getattr(value, "ndim", 1) == 0:
        value = value.item()
    missing = type(value).__name__ in ("NAType", "NaTType") or (isinstance(value, float) and math.isnan(value))
    return None if missing else value


def _text(value: Any, whole: bool) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return str(int(value)) if whole and math.isfinite(value) else repr(value)
    return str(value)


def _class_names(frame: Any, key: Any) -> Sequence[str] | None:
    """Hugging Face's names for the numbers of a column."""
    return getattr(frame.features.get(key), "names", None) if is_hugging_face(frame) else None


def _is_categorical(column: Any) -> bool:
    """Whether its library (pandas, polars, Arrow) says that a column has categories, whatever these are."""
    kind = str(getattr(column, "dtype", getattr(column, "type", ""))).lower()
    return kind.startswith(("category", "categorical", "enum", "dictionary"))


def kind_of(values: Iterable[Any]) -> str:
    """The kind of a column's values, gaps left out.

    Returns:
        ``"numbers"``, ``"categories"`` of words, ``"truth values"``, or else the names of the values' types; empty
        where there is no value.

    Example:
        >>> kind_of([3, 0.5]), kind_of(["01234"]), kind_of([True, False]), kind_of([1, "1"]), kind_of([])
        ('numbers', 'categories', 'truth values', 'int, str', '')
    """
    types = {type(value) for value in values}
    bases = ((bool, TRUTH), (Number, NUMBERS), (str, CATEGORIES))
    kinds = {next((kind for base, kind in bases if issubclass(each, base)), each.__name__) for each in types}
    return kinds.pop() if len(kinds) == 1 else ", ".join(sorted(each.__name__ for each in types))
