"""The table of a run: what is a row of it, and what is new in a round."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas
import torch

from flsv.report.run_table import SCHEMA, Numbers, RunTable

NAN = float("nan")
NAMES = ("Boston", "Lyon", "Graz")


def told(values: list[float], low: list[float], high: list[float]) -> RunTable:
    return RunTable.of_round(0, [Numbers("sv", values, ends=[low, high])], NAMES)


def test_every_column_has_its_type_whatever_the_rows_are() -> None:
    numbers = [Numbers("sv", torch.tensor([0.5, NAN, 1.0])), Numbers("cost", [[1.0, 2.0]] * 3, {"up": "up", "7": "b"})]
    for table in (
        RunTable.of_round(3, numbers, NAMES),
        RunTable.of_round(0, (), ()),
        RunTable.of_round(3, numbers, NAMES).before(9),
    ):
        # Texts are objects before pandas 3.
        assert table.frame.dtypes.to_dict() == {name: pandas.Series(dtype=kind).dtype for name, kind in SCHEMA.items()}
    rows = [row[:5] for row in RunTable.of_round(3, numbers, NAMES).rows()]
    assert rows[:2] == [(3, "sv", 0, "", 0.5), (3, "sv", 2, "", 1.0)]
    assert rows[2:4] == [(3, "cost", 0, "up", 1.0), (3, "cost", 1, "up", 1.0)]  # column by column


def test_what_is_new_is_another_value_or_another_interval() -> None:
    before = told([1.0, 2.0, NAN], [0.0, 1.0, NAN], [2.0, 3.0, NAN])
    for now, changed in (
        (before, []),
        (told([1.0, 2.5, NAN], [0.0, 1.0, NAN], [2.0, 3.0, NAN]), [1]),
        (told([1.0, 2.0, 3.0], [0.0, 1.0, NAN], [2.0, 3.0, NAN]), [2]),
        (told([1.0, 2.0, NAN], [0.5, 1.0, NAN], [2.0, 3.0, NAN]), [0]),
        (told([1.0, 2.0, NAN], [NAN, 1.0, NAN], [NAN, 3.0, NAN]), []),  # no longer known: the value is as it was
        (told([NAN, 2.0, NAN], [NAN, 1.0, NAN], [NAN, 3.0, NAN]), []),
    ):
        assert now.changes(before).frame["client"].tolist() == changed
    empty = RunTable.of_round(0, (), ())
    assert before.changes(empty).csv() == before.csv()
    assert empty.changes(before).csv() == b""


def test_what_is_written_is_read_back_to_the_bit(tmp_path: Path) -> None:
    values = torch.rand(3, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64) ** 40
    table = RunTable.of_round(2, [Numbers("sv", values, {"0": "Shirt", "1": "Dress"})], NAMES)
    path = tmp_path / "contributions.csv"
    path.write_bytes((",".join(SCHEMA) + "\n").encode() + table.csv())
    again = RunTable.read(path, NAMES)
    assert again.csv() == table.csv()
    read = np.array([again.last("sv", 3, column) for column in again.columns("sv")]).T
    assert torch.equal(torch.tensor(read), values)
    assert again.history("sv", 3, "1", [2]) == [values[:, 1].tolist()]
