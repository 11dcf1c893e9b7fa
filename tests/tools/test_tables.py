"""Tables: YAML becomes cells, each shipped table runs one, finished cells are kept, and numbers become tables."""

import os
from dataclasses import replace

import pytest
from cells import measure
from run_table import TABLES, cells_of, main, read_table, shortened
from table_report import markdown, report

ROOT = os.environ.get("FLSV_DATA_ROOT")


# ---- the shipped tables


DIGITS = {"data.source": "digits", "trainer.max_epochs": 2}
#: A row and a column of each table, and overrides that make its cell one of digits.
CELL_OF_TABLE = {
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


def run_cell(cell, root):
    """In place of a run: ten times the seed plus the length of the row's name."""
    return {"value": 10.0 * cell.seed + len(cell.row)}


@pytest.mark.slow
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
        str(tmp_path / "kept"),
        "--root",
        str(tmp_path),
        "--workers",
        "1",
    ]
    main([*arguments, "--seeds", "2", "--csv", str(tmp_path / "out.csv")])
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
