"""Tables as pandas frames: files of comma-separated values, Parquet files, and DataFrames of other packages."""

from __future__ import annotations

import csv
import difflib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from flsv.utilities.errors import ColumnError, ConfigurationError, in_words, listed

#: Endings of table files.
TABLES = (".csv", ".tsv", ".parquet")
#: Characters that a value may have: csv's own limit, 131,072, is too low for long texts.
_LONGEST = 2**31 - 1


def is_table_file(path: Any) -> bool:
    """Return whether ``path`` is that of a file of comma- or tab-separated values or of a Parquet file."""
    return isinstance(path, Path) and path.suffix.lower() in TABLES and path.is_file()


@dataclass(frozen=True)
class Table:
    """Rows with named columns.

    Args:
        path: the file, or another origin of the rows, for messages.
        frame: the columns, by names without white space around them. A row's index is the line of the file in which it
            ends, or its number.
        typed: whether columns have types; else all are text, as in a file of comma-separated values.
        together: the tables that are concatenated here; empty for a single one.
    """

    path: Path | str
    frame: pd.DataFrame
    typed: bool = False
    together: Sequence[Table] = ()

    def __len__(self) -> int:
        return len(self.frame)

    @property
    def parts(self) -> Sequence[Table]:
        """Tables that are concatenated here, or this one alone."""
        return self.together or (self,)

    def places(self, rows: Sequence[int]) -> str:
        """Name rows by their lines or numbers, for messages.

        Example:
            >>> Table("wards.csv", pd.DataFrame(index=[2, 3, 4, 9])).places([0, 1, 2, 3])
            'line 2 .. 4, 9'
        """
        return f"{'row' if self.typed else 'line'} {in_words(self.frame.index[list(rows)].tolist())}"

    def holding(self, rows: Any) -> str:
        """Name the tables that have some of the rows, bool ``[N]``; if all have, by their common name."""
        ends = np.cumsum([len(part) for part in self.parts])
        found = [part.path for part, held in zip(self.parts, np.split(np.asarray(rows), ends[:-1])) if held.any()]
        return str(self.path) if len(found) == len(ends) else listed(found)

    def where(self, row: int) -> str:
        """Name the table of a row and its line there, for messages."""
        for part in self.parts:
            if row < len(part):
                break
            row -= len(part)
        return f"{part.path}, {part.places([row])}"

    def take(self, rows: np.ndarray) -> Table:
        """Return a table of some of the rows."""
        return replace(self, frame=self.frame.iloc[rows])

    def row_names(self, ids: Sequence[str], group: str | None) -> dict[str, list[str]]:
        """Return names by which readers of the file recognize each row: line, client, and columns that are no features.

        Args:
            ids: columns; those that the table lacks are left out.
            group: the column of the rows' clients, or None.

        Example:
            >>> frame = pd.DataFrame({"ward": ["A", "B"], "id": ["7", "9"]}, index=[2, 3])
            >>> Table("wards.csv", frame).row_names(["id", "nr"], "ward")
            {'line': ['2', '3'], 'client': ['A', 'B'], 'id': ['7', '9']}
        """
        columns = {"client": group, **{name: name for name in ids}}
        held = {title: self.frame[name].astype(str).tolist() for title, name in columns.items() if name in self.frame}
        return {"line": list(map(str, self.frame.index.tolist())), **held}

    def column(self, name: str, argument: str) -> pd.Series:
        """Return a column by its name.

        Args:
            name: name of the column.
            argument: the argument that gave ``name``, for the message.

        Raises:
            ConfigurationError: a table has no column of that name.
        """
        lacking = next((part for part in self.parts if name not in part.frame), None)
        if lacking is None:
            return self.frame[name]
        close = difflib.get_close_matches(name, lacking.frame.columns, 1)
        hint = f"Did you mean {close[0]!r}?" if close else f"It has {listed(lacking.frame.columns, 20)}."
        message = f"{lacking.path} has no column {name!r} ({argument}). {hint}"
        raise ColumnError(message, {"exclude": [name]})  # leaving it out helps where other tables have it


def one_table(tables: Sequence[Table]) -> Table:
    """Concatenate tables; with a text file among them, all columns become text."""
    if len(tables) == 1:
        return tables[0]
    typed = all(table.typed for table in tables)
    frames = [table.frame.apply(words_of) if table.typed and not typed else table.frame for table in tables]
    return Table(f"the {len(tables)} tables", pd.concat(frames, ignore_index=True), typed, tables)


def words_of(column: pd.Series) -> pd.Series:
    """Convert values to text without white space around it; a gap is NaN.

    Whole numbers have no decimal point, though pandas makes floats of them where a column has gaps.

    Example:
        >>> words_of(pd.Series([3.0, None])).tolist(), words_of(pd.Series([3.5, 1.0])).tolist()
        (['3', nan], ['3.5', '1.0'])
    """
    values = column.astype(object)
    held = values[values.notna()].tolist()
    floats = [value for value in held if isinstance(value, float) and np.isfinite(value)]
    if floats and all(value.is_integer() for value in floats):
        held = [int(value) if isinstance(value, float) and np.isfinite(value) else value for value in held]
    words = pd.Series(np.nan, index=column.index, dtype=object)
    words[values.notna()] = [str(value).strip() for value in held]
    return words


def data_root(root: str | None) -> Path:
    """Return the folder of data: ``root``, else ``$FLSV_DATA_ROOT``, else ``data``."""
    return Path(root or os.environ.get("FLSV_DATA_ROOT") or "data")


def find_place(name: str | Path, root: str | None) -> Path | None:
    """Find a file or a folder, below :func:`data_root` or as given; return None if there is none."""
    return next((place for place in (data_root(root) / name, Path(name)) if str(name) and place.exists()), None)


def looked_at(name: str, root: str | None) -> str:
    """List the paths at which :func:`find_place` looks, for messages."""
    return " and ".join(dict.fromkeys(str(place.absolute()) for place in (data_root(root) / name, Path(name))))


def read_table_file(path: Path, delimiter: str = ",") -> Table:
    """Read a table's file by its ending; ``.tsv`` has tabs."""
    if path.suffix.lower() == ".parquet":
        return read_parquet(path)
    return read_csv_table(path, "\t" if path.suffix.lower() == ".tsv" and delimiter == "," else delimiter)


def read_csv_table(path: Path, delimiter: str = ",") -> Table:
    """Read a file with a header line, in UTF-8 with or without a byte order mark; quoted values may span lines.

    Args:
        path: the file.
        delimiter: one character between values.

    Raises:
        ConfigurationError: a file that is not UTF-8 or no table, no rows, columns without a name or with the same one,
            or a row with more or fewer values than the header has names.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = Path(folder) / "wards.csv"
        ...     _ = path.write_text('ward,note\\nA,"slept, then ate"\\nB,\\n')
        ...     read_csv_table(path).frame["note"].tolist()
        ['slept, then ate', '']
    """
    csv.field_size_limit(_LONGEST)
    _check_delimiter(path, delimiter)
    try:
        # The header is read as a row, or pandas would rename columns of one name. This engine is strict about quotes,
        # and a value that a row lacks is NaN, where an empty one is not.
        options: dict[str, Any] = {"engine": "python", "header": None, "dtype": str, "skip_blank_lines": False}
        rows = pd.read_csv(path, sep=delimiter, keep_default_na=False, encoding="utf-8-sig", **options).astype(object)
    except (UnicodeDecodeError, pd.errors.ParserError, pd.errors.EmptyDataError, OSError) as error:
        raise ConfigurationError(
            f"{path} cannot be read as a header and rows of comma-separated values in UTF-8: {error}. The first line "
            f"has the columns' names; a value with a {delimiter!r} in it needs quotes."
        ) from error
    # Lines of the file, since a value may span several.
    rows.index = rows.index + 1 + rows.apply(lambda column: column.str.count("\n").fillna(0)).sum(axis=1).cumsum()
    rows.index = rows.index.astype(int)
    names = ["" if isinstance(name, float) else name.strip() for name in rows.iloc[0]]
    check_column_names(path, names)
    rows = rows.iloc[1:].dropna(how="all")  # a blank line is none
    short = rows.index[rows.isna().any(axis=1)]
    if len(short):
        count = int(rows.loc[short[0]].notna().sum())
        raise ConfigurationError(f"{path}, line {short[0]}: {count} values, but the header has {len(names)} names.")
    return Table(path, rows.set_axis(names, axis=1))


def _check_delimiter(path: Path, delimiter: str) -> None:
    """Refuse a file whose first line has another delimiter than ``delimiter``."""
    try:
        with path.open(encoding="utf-8-sig") as file:
            header = file.readline()
    except (UnicodeDecodeError, OSError):
        return  # reading the file raises the error
    other = next((mark for mark in ";\t|," if delimiter not in header and mark in header), None)
    if other is not None:
        option = f"columns: {json.dumps({'delimiter': other})}"
        raise ConfigurationError(
            f"{path}: its values have {other!r} between them, not {delimiter!r}. If all files are like that, say "
            f'{option} (decimal commas: "decimal": ","); else save this one with {delimiter!r}.'
        )


def check_column_names(path: Path | str, names: Sequence[str]) -> None:
    """Raise ConfigurationError where a column has no name, or two have the same."""
    wrong = [name for name in names if not name or names.count(name) > 1]
    if wrong:
        raise ConfigurationError(
            f"{path}: columns are called {listed(wrong, show=repr)}. Every column needs a name of its own."
        )


def read_parquet(path: Path) -> Table:
    """Read a Parquet file, whose columns have types; needs ``pip install "flsv[parquet]"``.

    Raises:
        ConfigurationError: the package ``pyarrow`` is not installed, or the file is damaged.
    """
    try:
        frame = pd.read_parquet(path, engine="pyarrow")
    except ImportError as error:
        raise ConfigurationError(f'{path} is read by pyarrow: pip install "flsv[parquet]".') from error
    except (ValueError, OSError) as error:  # pyarrow's errors are subclasses
        raise ConfigurationError(f"{path} cannot be read as a Parquet file: {error}") from error
    return replace(frame_table(frame), path=path)


def is_columnar(given: Any) -> bool:
    """Return whether ``given`` is a DataFrame, or becomes one by ``to_pandas()`` (polars, Arrow, Hugging Face)."""
    named = hasattr(given, "columns") or hasattr(given, "column_names")
    return isinstance(given, pd.DataFrame) or (named and hasattr(given, "to_pandas") and not isinstance(given, type))


def frame_table(given: Any) -> Table:
    """Make a table of a DataFrame's columns with their types; its index is dropped.

    Example:
        >>> frame_table(pd.DataFrame({7: ["x"]}, index=["a"])).frame.to_dict()
        {'7': {0: 'x'}}
    """
    frame = given if isinstance(given, pd.DataFrame) else given.to_pandas()
    names = [str(name).strip() for name in frame.columns]
    check_column_names(type(given).__name__, names)
    frame = frame.set_axis(names, axis=1).reset_index(drop=True)
    named = {name: words_of(frame[name]) for name in frame.select_dtypes("category")}
    return Table(type(given).__name__, frame.assign(**named), typed=True)
