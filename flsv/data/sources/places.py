"""Recognition of tables, and the folders where files of data are looked for.

This module does not import pandas, since it is also used for data that are not tables.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

#: Endings of table files.
TABLE_SUFFIXES = (
    ".csv",
    ".tsv",
    ".parquet",
)


def is_table_file(path: Path) -> bool:
    """Return whether ``path`` is a table's file."""
    suffix = path.suffix.lower()
    return suffix in TABLE_SUFFIXES and path.is_file()


class TableRows:
    """Base class of tables, by which they are recognized without an import of pandas."""


def data_root(root: str | None) -> Path:
    """Return the folder of data: ``root``, else ``$FLSV_DATA_ROOT``, else ``data``."""
    folder = root or os.environ.get("FLSV_DATA_ROOT")
    return Path(folder or "data")


def _candidates(
    name: str | Path,
    root: str | None,
) -> list[Path]:
    return [
        data_root(root) / name,
        Path(name),
    ]


def find_place(
    name: str | Path,
    root: str | None,
) -> Path | None:
    """Return a path below :func:`data_root` or else the working folder, or None if it does not exist."""
    if not str(name):
        return None
    for path in _candidates(name, root):
        if path.exists():
            return path
    return None


def looked_at(name: str, root: str | None) -> str:
    """Return text for messages: the paths where :func:`find_place` looks for ``name``."""
    paths = [str(path.absolute()) for path in _candidates(name, root)]
    different_paths = dict.fromkeys(paths)
    return " and ".join(different_paths)


def is_columnar(data: Any) -> bool:
    """Return whether ``data`` is a DataFrame or has ``to_pandas()`` (polars, Arrow, Hugging Face)."""
    pandas = sys.modules.get("pandas")  # if it is not imported, no object is a DataFrame
    # While another thread imports pandas, the class may not exist yet.
    frame_class = getattr(pandas, "DataFrame", ())
    if isinstance(data, frame_class):
        return True
    if isinstance(data, type):
        return False

    has_column_names = hasattr(data, "columns") or hasattr(data, "column_names")
    return has_column_names and hasattr(data, "to_pandas")
