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
#: Largest number of characters of a value: the csv module's limit, 131,072, is too low for long texts.
_LONGEST = 2**31 - 1


def is_table_file(path: Any) -> bool:
    """Return whether ``path`` is the ``Path`` of a file of comma- or tab-separated values or of a Parquet file."""
    return isinstance(path, Path) and path.suffix.lower() in TABLES and path.is_file()


@dataclass(frozen=True)
class Table:
    """Rows with named columns.

    Args:
        path: path of the file, or another name for the origin of the rows, for messages.
        frame: the columns; their names have no white space around them. The index of a row is the number of the line in
            which it ends in the file, or the number of the row.
        typed: whether columns have types; if False, all values are texts, as in a file of comma-separated values.
        together: the tables from which this one was concatenated; empty for a single table.
    """

    path: Path | str
    frame: pd.DataFrame
    typed: bool = False
    together: Sequence[Table] = ()

    def __len__(self) -> int:
        return len(self.frame)

    @property
    def parts(self) -> Sequence[Table]:
        """Tables from which this one was concatenated, or only this table."""
        return self.together or (self,)

    def places(self, rows: Sequence[int]) -> str:
        """Return words for some rows, by their lines in the file or their numbers, for messages.

        Example:
            >>> Table("wards.csv", pd.DataFrame(index=[2, 3, 4, 9])).places([0, 1, 2, 3])
            'line 2 .. 4, 9'
        """
        return f"{'row' if self.typed else 'line'} {in_words(self.frame.index[list(rows)].tolist())}"

    def holding(self, rows: Any) -> str:
        """Return the names of the tables with at least one of the ``rows``, bool ``[N]``; the common name if all tables
        have one."""
        ends = np.cumsum([len(part) for part in self.parts])
        found = [part.path for part, held in zip(self.parts, np.split(np.asarray(rows), ends[:-1])) if held.any()]
        return str(self.path) if len(found) == len(ends) else listed(found)

    def where(self, row: int) -> str:
        """Return the name of the table that has the row number ``row``, and the row's line in it, for messages."""
        for part in self.parts:
            if row < len(part):
                break
            row -= len(part)
        return f"{part.path}, {part.places([row])}"

    def take(self, rows: np.ndarray) -> Table:
        """Return a table with the rows of the numbers ``rows`` only."""
        return replace(self, frame=self.frame.iloc[rows])

    def row_names(self, ids: Sequence[str], group: str | None) -> dict[str, list[str]]:
        """Return labels by which a reader of the file recognizes each row: its line, its client and identifying
        columns.

        Args:
            ids: names of the identifying columns; columns that the table lacks are left out.
            group: the column with each row's client; None without such a column.

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
            argument: the argument in which the user gave ``name``, for the message.

        Raises:
            ConfigurationError: a table has no column ``name``.
        """
        lacking = next((part for part in self.parts if name not in part.frame), None)
        if lacking is None:
            return self.frame[name]
        close = difflib.get_close_matches(name, lacking.frame.columns, 1)
        hint = f"Did you mean {close[0]!r}?" if close else f"It has {listed(lacking.frame.columns, 20)}."
        message = f"{lacking.path} has no column {name!r} ({argument}). {hint}"
        raise ColumnError(message, {"exclude": [name]})  # leaving it out helps where other tables have it


def one_table(tables: Sequence[Table]) -> Table:
    """Concatenate tables. If one of them is a text file, the values of all tables become text."""
    if len(tables) == 1:
        return tables[0]
    typed = all(table.typed for table in tables)
    frames = [table.frame.apply(words_of) if table.typed and not typed else table.frame for table in tables]
    return Table(f"the {len(tables)} tables", pd.concat(frames, ignore_index=True), typed, tables)


def words_of(column: pd.Series) -> pd.Series:
    """Convert values to texts without white space around them; gaps become NaN.

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
    """Return the path of a file or folder, looked up below :func:`data_root`, then as given; None if it does not
    exist."""
    return next((place for place in (data_root(root) / name, Path(name)) if str(name) and place.exists()), None)


def looked_at(name: str, root: str | None) -> str:
    """Return the paths at which :func:`find_place` looks for ``name``, as text for messages."""
    return " and ".join(dict.fromkeys(str(place.absolute()) for place in (data_root(root) / name, Path(name))))


def read_table_file(path: Path, delimiter: str = ",") -> Table:
    """Read a table from a Parquet file, or a text file with ``delimiter`` between values (tabs in a file ``.tsv``)."""
    if path.suffix.lower() == ".parquet":
        return read_parquet(path)
    return read_csv_table(path, "\t" if path.suffix.lower() == ".tsv" and delimiter == "," else delimiter)


def read_csv_table(path: Path, delimiter: str = ",") -> Table:
    """Read a file with a header line, in UTF-8 with or without a byte order mark; quoted values may span lines.

    Args:
        path: the file.
        delimiter: one character between values.

    Raises:
        ConfigurationError: the file is not UTF-8 or not a table, a column has no name, two columns have the same name,
            or a row has more or fewer values than the header.

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
    """Raise ConfigurationError if the file's first line has another delimiter than ``delimiter``."""
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
    """Raise ConfigurationError if a column has no name, or two columns have the same name."""
    wrong = [name for name in names if not name or names.count(name) > 1]
    if wrong:
        raise ConfigurationError(
            f"{path}: columns are called {listed(wrong, show=repr)}. Every column needs a name of its own."
        )


def read_parquet(path: Path) -> Table:
    """Read a Parquet file, whose columns keep their types; this needs ``pip install pyarrow``.

    Raises:
        ConfigurationError: the package ``pyarrow`` is not installed, or the file is damaged.
    """
    try:
        frame = pd.read_parquet(path, engine="pyarrow")
    except ImportError as error:
        raise ConfigurationError(f"{path} is read by pyarrow: pip install pyarrow.") from error
    except (ValueError, OSError) as error:  # pyarrow's errors are subclasses
        raise ConfigurationError(f"{path} cannot be read as a Parquet file: {error}") from error
    return replace(frame_table(frame), path=path)


def is_columnar(given: Any) -> bool:
    """Return whether ``given`` is a DataFrame or can be converted by ``to_pandas()`` (polars, Arrow, Hugging Face)."""
    named = hasattr(given, "columns") or hasattr(given, "column_names")
    return isinstance(given, pd.DataFrame) or (named and hasattr(given, "to_pandas") and not isinstance(given, type))


def frame_table(given: Any) -> Table:
    """Convert a DataFrame to a table; columns keep their types, and the index is dropped.

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
