"""A table's YAML file: parts, rules and presets become cells; what it does not know is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from run_table import TABLES, cells_of, preset_of, read_table

TABLE = """
report: table_statistics:means
_few: &few {set: {data.splits.max_samples: 300}}
blocks:
  - axes:
      source: {digits: *few, mnist: {only: full}}
      rate: [0.1, 1]
      row: {FedAvg: {files: [fedavg.yaml]}, pFedMe: {files: [pfedme.yaml], small: {a: 1}, full: {a: 2}}}
    column: "{source}, {rate}"
    files: [digits.yaml]
    set: {data.source: "{source}", lr: "{rate}", b: 3}
    rules:
      - {if: {row: p*}, unset: [b], measure: "table_runs:own_models"}
      - {if: {row: FedAvg, rate: 1}, drop: true}
"""


def test_parts_rules_and_presets(tmp_path: Path) -> None:
    path = tmp_path / "made_up.yaml"
    path.write_text(TABLE)
    small = {cell.key: cell for cell in cells_of(read_table(path), False, [0, 5])}
    assert list(small)[:3] == [("FedAvg", "digits, 0.1", 0), ("pFedMe", "digits, 0.1", 0), ("pFedMe", "digits, 1", 0)]
    assert len(small) == 2 * 3
    last = small["pFedMe", "digits, 1", 5]
    assert last.files == ("digits.yaml", "pfedme.yaml")
    assert last.overrides == {"data.source": "digits", "lr": 1, "data.splits.max_samples": 300, "a": 1}
    assert last.measure == "table_runs:own_models"
    assert small["FedAvg", "digits, 0.1", 0].overrides["b"] == 3
    full = {cell.key: cell for cell in cells_of(read_table(path), True, [0])}
    assert len(full) == 2 * 3
    assert full["pFedMe", "mnist, 0.1", 0].overrides == {"data.source": "mnist", "lr": 0.1, "a": 2}
    preset = preset_of(path)
    assert (preset.name, preset.seeds, len(preset.cells(False, [0]))) == ("made_up", 5, 3)


@pytest.mark.parametrize(
    ("said", "by", "strange"),
    [
        ("report:", "reports:", "reports"),
        ("only: full", "presets: full", "presets"),
        ("    rules:", "    rule:", "rule"),
    ],
)
def test_what_a_table_does_not_have(tmp_path: Path, said: str, by: str, strange: str) -> None:
    path = tmp_path / "made_up.yaml"
    path.write_text(TABLE.replace(said, by, 1))
    with pytest.raises(ValueError, match=f"{strange} is unknown: expected"):
        read_table(path)


@pytest.mark.parametrize("path", sorted(TABLES.glob("*.yaml")), ids=lambda path: path.stem)
def test_shipped_tables_have_distinct_cells_in_whole_seeds(path: Path) -> None:
    preset = preset_of(path)
    for full in (False, True):
        made = preset.cells(full, [3, 4])
        assert len({cell.key for cell in made}) == len(made) > 2
        assert {cell.seed for cell in made} == {3, 4}
