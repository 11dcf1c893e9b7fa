"""Tables of a command as files."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flsv._lightning.durable import replacing


def write_rows(path: Path, header: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> None:
    """A CSV file of rows by the names in the header, in place of an earlier one as a whole."""
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, header, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    with replacing(path) as file:
        file.write(text.getvalue().encode())
