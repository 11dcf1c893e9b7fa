"""Times of reading tables: from a text file to the features of a federation of three clients.

    python tools/bench_tables.py

The data dictionary is drafted, or given. Beside each time stands what pandas needs to read the same file and guess the
types of its columns. The tables have
numbers of two decimals and of all digits, whole numbers, words, truth values and missing values.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from flsv import FederatedDataModule
from flsv.data import Dictionary, Splits

#: Rows and columns of the tables.
SIZES = ((100_000, 12), (30_000, 300))
SHARE_OF_GAPS = 0.05


def make_column(number: int, rows: int, generator: np.random.Generator) -> pd.Series:
    """Return one of six kinds of columns, by its number. Every fifth column has gaps."""
    measurements = generator.normal(50, 10, rows)
    makers: list[Callable[[], Any]] = [
        lambda: measurements.round(2),
        lambda: measurements.round(1),
        lambda: measurements,
        lambda: generator.integers(0, 100, rows),
        lambda: generator.choice(["A", "B", "C"], rows),
        lambda: generator.choice([True, False], rows),
    ]
    column = pd.Series(makers[number % len(makers)](), dtype=object)
    if number % 5 == 0:
        column[generator.random(rows) < SHARE_OF_GAPS] = ""
    return column


def write_table(file: Path, rows: int, columns: int) -> None:
    generator = np.random.default_rng(0)
    frame = pd.DataFrame(
        {f"c{number}": make_column(number, rows, generator) for number in range(columns)}
    )
    frame["clinic"] = generator.choice(["Boston", "Lyon", "Osaka"], rows)
    frame["died"] = generator.choice(["no", "yes"], rows)
    frame.to_csv(file, index=False)


def seconds_of(read: Callable[[], object]) -> float:
    """Return the seconds of processor time that a call takes."""
    time_before = time.process_time()
    read()
    return time.process_time() - time_before


def read_federation(file: Path, dictionary: Dictionary | None = None) -> Dictionary:
    """Read a federation's table, and return the dictionary by which it was read."""
    data = FederatedDataModule(
        str(file),
        labels="died",
        groups="clinic",
        pos_label="yes",
        dictionary=dictionary,
        splits=Splits(server_val=0.1, seed=0),
    )
    data.setup("fit")
    return data.dictionary


def main() -> None:
    print(f"{'rows':>8} {'columns':>8} {'draft, s':>9} {'dictionary, s':>14} {'pandas, s':>10}")
    with tempfile.TemporaryDirectory() as folder:
        small = Path(folder, "small.csv")
        write_table(small, rows=100, columns=6)
        read_federation(small)  # what is imported once is not counted

        for rows, columns in SIZES:
            file = Path(folder, "table.csv")
            write_table(file, rows, columns)
            dictionary = read_federation(file)
            seconds_of_draft = seconds_of(partial(read_federation, file))
            seconds = seconds_of(partial(read_federation, file, dictionary))
            seconds_of_pandas = seconds_of(partial(pd.read_csv, file))
            times = f"{seconds_of_draft:9.2f} {seconds:14.2f} {seconds_of_pandas:10.2f}"
            print(f"{rows:8,} {columns:8} {times}")


if __name__ == "__main__":
    main()
