"""The table of a run: what is a row of it, and what is new in a round."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas
import torch

from flsv.report.run_table import (
    SCHEMA,
    Numbers,
    changes,
    columns_in,
    csv_lines,
    frame,
    history,
    last,
    read_table,
    rows_of,
)
from flsv.round.result import Row

NAN = float("nan")
NAMES = ("Boston", "Lyon", "Graz")


def rows(values: list[float], low: list[float], high: list[float]) -> list[Row]:
    return rows_of(0, [Numbers("sv", values, ends=[low, high])], NAMES)


def test_every_column_has_its_type_whatever_the_rows_are() -> None:
    numbers = [Numbers("sv", torch.tensor([0.5, NAN, 1.0])), Numbers("cost", [[1.0, 2.0]] * 3, {"up": "up", "7": "b"})]
    known = rows_of(3, numbers, NAMES)
    for table in (frame(known), frame(())):
        # Texts are objects before pandas 3.
        assert table.dtypes.to_dict() == {name: pandas.Series(dtype=kind).dtype for name, kind in SCHEMA.items()}
    assert [row[:5] for row in known[:2]] == [(3, "sv", 0, "", 0.5), (3, "sv", 2, "", 1.0)]
    assert [row[:5] for row in known[2:4]] == [(3, "cost", 0, "up", 1.0), (3, "cost", 1, "up", 1.0)]  # by column


def test_what_is_new_is_another_value_or_another_interval() -> None:
    before = rows([1.0, 2.0, NAN], [0.0, 1.0, NAN], [2.0, 3.0, NAN])
    for now, changed in (
        (before, []),
        (rows([1.0, 2.5, NAN], [0.0, 1.0, NAN], [2.0, 3.0, NAN]), [1]),
        (rows([1.0, 2.0, 3.0], [0.0, 1.0, NAN], [2.0, 3.0, NAN]), [2]),
        (rows([1.0, 2.0, NAN], [0.5, 1.0, NAN], [2.0, 3.0, NAN]), [0]),
        (rows([1.0, 2.0, NAN], [NAN, 1.0, NAN], [NAN, 3.0, NAN]), []),  # no longer known: the value is as it was
        (rows([NAN, 2.0, NAN], [NAN, 1.0, NAN], [NAN, 3.0, NAN]), []),
    ):
        assert [row.client for row in changes(now, before)] == changed
    assert changes(before, []) == before
    assert changes([], before) == []


def test_what_is_written_is_read_back_to_the_bit(tmp_path: Path) -> None:
    values = torch.rand(3, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64) ** 40
    table = rows_of(2, [Numbers("sv", values, {"0": "Shirt", "1": "Dress"})], NAMES)
    path = tmp_path / "contributions.csv"
    path.write_bytes((",".join(SCHEMA) + "\n").encode() + csv_lines(table))
    again = read_table(path)
    assert csv_lines(again.itertuples(index=False)) == csv_lines(table)
    read = np.array([last(again, "sv", 3, column) for column in columns_in(again, "sv")]).T
    assert torch.equal(torch.tensor(read), values)
    assert history(again, "sv", 3, "1", [2]).to_numpy().tolist() == [values[:, 1].tolist()]
