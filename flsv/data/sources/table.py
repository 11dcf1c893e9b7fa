"""A table, how one is recognized, and where files of data are looked for.

Nothing in it loads pandas: data that are no tables come by, too.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flsv.utilities.errors import ColumnError, in_words, listed

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd

    from flsv.data.sources.text_file import TextFile

#: Endings of table files.
TABLE_SUFFIXES = (".csv", ".tsv", ".parquet")


def is_table_file(path: Any) -> bool:
    """Return whether ``path`` is the ``Path`` of a table's file."""
    if not isinstance(path, Path):
        return False
    return path.suffix.lower() in TABLE_SUFFIXES and path.is_file()


class TableRows:
    """Base of tables, so that data that are no tables do not load pandas."""


@dataclass(frozen=True)
class Table(TableRows):
    """Rows with named columns, which are texts unless ``typed``, or numbers of a text file that needs no second look.

    A row's index is its last line in the file, or its number. ``client`` is "" if nobody's name is known.
    ``text_file`` has the texts of numbers.
    """

    path: Path | str
    frame: pd.DataFrame
    typed: bool = False
    together: Sequence[Table] = ()
    client: str = ""
    text_file: TextFile | None = None

    def __len__(self) -> int:
        return len(self.frame)

    @property
    def parts(self) -> Sequence[Table]:
        """Tables that were concatenated into this one, or only this table."""
        return self.together or (self,)

    def places(self, rows: Sequence[int]) -> str:
        """Return text for messages that names rows by their lines, or by their numbers in a DataFrame."""
        lines = self.lines[list(rows)]
        return f"{lines.name} {in_words(lines.tolist())}"

    def where(self, row: int) -> str:
        """Return text for messages that names the table and line of a row."""
        for part in self.parts:
            if row < len(part):
                break
            row -= len(part)
        return f"{part.path}, {part.places([row])}"

    @property
    def lines(self) -> pd.Index:
        """Each row's line in its file, or its number in a DataFrame. The index's name says which."""
        indices = [part.frame.index for part in self.parts]
        index = indices[0].append(indices[1:])
        return index.rename("row" if self.typed else "line")

    def take(self, rows: np.ndarray) -> Table:
        """Return a table with only the rows at the positions ``rows``."""
        return replace(self, frame=self.frame.iloc[rows])

    def row_names(
        self,
        id_columns: Sequence[str],
        group_column: str | None,
    ) -> dict[str, list[str]]:
        """Return the texts that identify each row, ``{title: texts}``: line, client, and ``id_columns``."""
        lines = self.frame.index.tolist()
        column_of_title = {"client": group_column}
        for name in id_columns:
            column_of_title[name] = name

        texts = {"line": list(map(str, lines))}
        for title, column_name in column_of_title.items():
            if column_name is not None and column_name in self.frame:
                column = self.values(column_name)
                texts[title] = column.astype(str).tolist()
        return texts

    def values(self, name: str) -> pd.Series:
        """Return the texts of the column ``name``, or what a typed table has."""
        if self.numbers(name) is None:
            return self.frame[name]
        if self.text_file is not None:
            texts = self.text_file.texts([name])
            return texts[name].loc[self.frame.index]
        import pandas as pd

        values_by_table = [table.values(name) for table in self.together]
        return pd.concat(values_by_table, ignore_index=True)

    def column(self, name: str, argument: str) -> pd.Series:
        """Return the :meth:`values` of the column ``name``. An error mentions the user's ``argument``."""
        self.check_has(name, argument)
        return self.values(name)

    def numbers(self, name: str) -> pd.Series | None:
        """Return the numbers of a column of a text file in which each value is plainly one or a gap, else None."""
        is_number = not self.typed and name in self.frame and self.frame[name].dtype.kind == "f"
        return self.frame[name] if is_number else None

    def check_has(self, name: str, argument: str) -> None:
        """Raise ColumnError that mentions the user's ``argument`` if a table lacks the column ``name``."""
        for part in self.parts:
            if name not in part.frame:
                column_names = listed(part.frame.columns, 20)
                # Leaving it out helps where other tables have it.
                raise ColumnError(
                    f"{part.path} has no column {name!r} ({argument}). It has {column_names}.",
                    {"exclude": [name]},
                )


def data_root(root: str | None) -> Path:
    """Return the folder of data: ``root``, else ``$FLSV_DATA_ROOT``, else ``data``."""
    return Path(root or os.environ.get("FLSV_DATA_ROOT") or "data")


def find_place(name: str | Path, root: str | None) -> Path | None:
    """Return a path below :func:`data_root` or else the working folder, or None if it does not exist."""
    if not str(name):
        return None
    for candidate in (data_root(root) / name, Path(name)):
        if candidate.exists():
            return candidate
    return None


def looked_at(name: str, root: str | None) -> str:
    """Return text for messages: the paths where :func:`find_place` looks for ``name``."""
    candidates = (data_root(root) / name, Path(name))
    paths = [str(candidate.absolute()) for candidate in candidates]
    return " and ".join(dict.fromkeys(paths))


def is_columnar(data: Any) -> bool:
    """Return whether ``data`` is a DataFrame or has ``to_pandas()`` (polars, Arrow, Hugging Face)."""
    pandas = sys.modules.get("pandas")  # without it nobody has a DataFrame
    # Without the class, which another thread may be about to define, nothing is a DataFrame.
    if isinstance(data, getattr(pandas, "DataFrame", ())):
        return True
    has_column_names = hasattr(data, "columns") or hasattr(data, "column_names")
    return has_column_names and hasattr(data, "to_pandas") and not isinstance(data, type)
