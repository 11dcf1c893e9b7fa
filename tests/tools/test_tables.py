"""Tables: YAML becomes cells, each shipped table runs one, finished cells are kept, and numbers become tables."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import cells
import pandas as pd
import pytest
from cells import Cell, Kept, Measured, finish, measure
from run_table import TABLES, cells_of, main, read_table, shortened
from scipy import stats
from table_report import markdown, paired, report

ROOT = os.environ.get("FLSV_DATA_ROOT")
NAMES = sorted(path.stem for path in TABLES.glob("*.yaml"))


# ---- the shipped tables


@pytest.mark.parametrize("name", NAMES)
def test_shipped_tables_list_no_run_twice(name):
    table = read_table(TABLES / f"{name}.yaml")
    for full in (False, True):
        table_cells = cells_of(table, full=full, seeds=[3, 4])
        keys = {cell.key for cell in table_cells}
        assert len(keys) == len(table_cells) >= 2
        assert {cell.seed for cell in table_cells} == {3, 4}
        assert all(callable(cells.named(cell.measure)) for cell in table_cells)

    for show in table["tables"]:
        if "of" in show:
            assert callable(cells.named(show["of"]))


DIGITS = {"data.source": "digits", "trainer.max_epochs": 2}
#: A row and a column of each table, and overrides that make its cell one of digits.
CELL_OF_TABLE: dict[str, tuple[str, str, dict[str, Any]]] = {
    "guo": (
        "ours",
        "mnist, softmax, biased",
        {
            **DIGITS,
            "data.batch_size": 10,
            "data.partitioner.init_args.total": 150,
            "data.splits.server_val": 0.1,
        },
    ),
    "pfedsv": ("pFedSV", "pathological, MNIST", {**DIGITS, "data.splits.max_samples": None}),
    "shapfed": ("values", "figure 3", {"data.splits.max_samples": None}),
    "shapleyfl": (
        "AFedSV",
        "Fashion-MNIST, data noise",
        {**DIGITS, "data.splits.max_samples": None},
    ),
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CELL_OF_TABLE)
def test_a_cell_of_every_table_runs_and_is_reported(name):
    row, column, overrides = CELL_OF_TABLE[name]
    table = read_table(TABLES / f"{name}.yaml")
    cells_by_key = {cell.key: cell for cell in cells_of(table, full=False, seeds=[0])}
    short_cell = shortened(table, cells_by_key[row, column, 0])
    digits_cell = replace(short_cell, overrides={**short_cell.overrides, **overrides})

    results = {digits_cell.key: measure(digits_cell, ROOT or "data")}

    tables = markdown(report(table["tables"], results))
    assert any(char.isdigit() for char in tables)


# ---- what is kept


def run_cell(cell: Cell, root: str) -> Measured:
    """In place of a run: ten times the seed plus the length of the row's name. Each call adds a line to a file."""
    if cell.row == "bad":
        raise ValueError("no such thing")
    with Path(root, "ran.txt").open("a") as file:
        file.write(f"{cell.row} {cell.seed}\n")
    return {"value": 10.0 * cell.seed + len(cell.row)}


def names_and_seeds_run(root: Path) -> list[str]:
    """Return what the calls of run_cell have written, a line each."""
    return (root / "ran.txt").read_text().splitlines()


def make_cells(*rows: str, seeds: int = 1) -> list[Cell]:
    made_up_cells = []
    for seed in range(seeds):
        for n, row in enumerate(rows):
            cell = Cell(row, "c", seed, ("fedavg.yaml",), {"n": n}, "tools.test_tables:run_cell")
            made_up_cells.append(cell)
    return made_up_cells


def test_finished_table_cells_are_not_run_again_but_one_with_a_truncated_line_is(tmp_path):
    path = tmp_path / "kept.jsonl"
    four_cells = make_cells("one", "three", seeds=2)

    results = finish(four_cells, Kept(path), str(tmp_path), workers=1)
    assert results["three", "c", 1] == {"value": 10.0 * 1 + len("three")}  # as run_cell has it
    assert len(names_and_seeds_run(tmp_path)) == 4

    text = path.read_text()
    path.write_text(text[:-20])  # killed while it was writing the last line
    for _ in range(2):
        results_again = finish(four_cells, Kept(path), str(tmp_path), workers=1)

        assert results_again == results
        assert len(names_and_seeds_run(tmp_path)) == 4 + 1


def test_run_table_command_runs_and_prints_the_asked_cells(tmp_path, capsys):
    path = tmp_path / "made_up.yaml"
    path.write_text(
        "asked: [large]\nmeasure: tools.test_tables:run_cell\n"
        "blocks: [{axes: {column: [small, large], row: [a, bb]}, files: [fedavg.yaml]}]\n"
        "tables: [{title: Values, value: value, minus: {bb: [a]}}]\n"
    )
    arguments = [
        str(path),
        "--kept",
        str(tmp_path / "kept.jsonl"),
        "--root",
        str(tmp_path),
        "--workers",
        "1",
    ]
    main(
        [
            *arguments,
            "--seeds",
            "2",
            "--csv",
            str(tmp_path / "out.csv"),
        ]
    )
    out = capsys.readouterr().out

    assert "| bb | 7.0 ± 7.1 |" in out
    assert "| bb minus a | **+1.00 [+1.00, +1.00]** |" in out
    assert "large" not in out
    assert "Values,bb,small,7.0 ± 7.1\n" in (tmp_path / "out.csv").read_text()

    main([*arguments, "--list", "--seeds", "1"])
    assert (
        capsys.readouterr().out.count("flsv fit --config configs/fedavg.yaml --seed_everything=0")
        == 4
    )

    main([*arguments, "--columns", "large", "--seeds", "1"])
    assert "| bb | 2.0 |" in capsys.readouterr().out

    with pytest.raises(SystemExit):
        main([*arguments, "--rows", "nobody"])


# ---- numbers become tables

OURS = pd.Series({0: 61.0, 1: 64.5, 2: 62.0, 3: 66.0, 4: 63.5})
OTHER = pd.Series({0: 60.0, 1: 62.0, 2: 61.5, 3: 63.0, 4: 62.0})


def test_paired_intervals_equal_scipys_over_the_seeds_that_both_have():
    low, high = stats.ttest_rel(OURS, OTHER).confidence_interval(0.95)
    mean_difference = (OURS - OTHER).mean()
    ours_with_seed_7 = pd.concat([OURS, pd.Series({7: 100.0})])
    other_with_seed_9 = pd.concat([OTHER, pd.Series({9: 0.0})])

    difference = paired(ours_with_seed_7, other_with_seed_9)

    assert f"{mean_difference:+.2f}" == "+1.70"
    assert difference == f"**+1.70 [{low:+.2f}, {high:+.2f}]**"  # bold, as 0 is outside
    assert paired(OURS, OURS) == "+0.00 [+0.00, +0.00]"
    assert paired(OURS[:1], OTHER[:1]) == "+1.00"  # of one seed, without an interval
    assert paired(OURS[:0], OTHER) == "-"  # of no seed
