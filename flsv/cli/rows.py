"""Tables of a command as files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flsv.csv_files import save_csv


def write_rows(path: Path, header: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> None:
    """A CSV file of rows by the names in the header, in place of an earlier one as a whole."""
    save_csv(path, [header, *([row[name] for name in header] for row in rows)])
