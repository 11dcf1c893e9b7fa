"""A table is killed, and goes on."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import table_cells
from rank_processes import free_port
from table_cells import CellsFailed, Kept, finish
from table_runs import Cell

from flsv.participants import Ranks

HERE = Path(__file__).parent
TOOLS = HERE.parents[1] / "tools"
NAMES = ["one", "two", "last"]
RUN = """
import sys
from pathlib import Path
from table_cells import Kept, finish
from table_runs import Cell
names, measure = ("one", "two", "last"), "made_up_cells:stuck_at_first"
cells = [Cell(row, "c", 0, ("fedavg.yaml",), {"n": n}, measure) for n, row in enumerate(names)]
finish(cells, Kept(Path(sys.argv[1], "kept.jsonl")), sys.argv[1], workers=1)
"""
RANKS = """
import os, sys
from pathlib import Path
from table_cells import Kept, finish
from table_runs import Cell
rows, measure = ("a", "b", "c", "bad"), "made_up_cells:of_rank"
cells = [Cell(row, "c", 0, ("fedavg.yaml",), {"n": n}, measure) for n, row in enumerate(rows)]
if __name__ == "__main__":
    kept = Kept(Path(sys.argv[1], os.environ["RANK"], "kept.jsonl"))  # no disk in common
    try:
        finish(cells, kept, sys.argv[1], workers=1)
    except Exception as error:
        print(type(error).__name__, error)
"""


def on_two_ranks(folder: Path) -> list[str]:
    """What two ranks that finish a table have printed."""
    script = folder / "table.py"
    script.write_text(RANKS)
    path = os.pathsep.join([str(HERE), str(TOOLS), str(TOOLS.parent), os.environ.get("PYTHONPATH", "")])
    common = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    common["MASTER_PORT"] = str(free_port())
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script), str(folder)],
            env={**os.environ, **common, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        return [rank.communicate(timeout=600)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()


@pytest.fixture(autouse=True)
def on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(HERE))


def cells(measure: str = "marked", rows: list[str] = NAMES) -> list[Cell]:
    return [Cell(row, "c", 0, ("fedavg.yaml",), {"n": n}, f"made_up_cells:{measure}") for n, row in enumerate(rows)]


def ran(folder: Path) -> list[str]:
    return (folder / "ran.txt").read_text().split("\n")[:-1] if (folder / "ran.txt").exists() else []


@pytest.mark.slow
def test_a_killed_table_goes_on(tmp_path: Path) -> None:
    """SIGKILL when two cells are finished and the third is at work; only the third is run again."""
    path = os.pathsep.join([str(HERE), str(TOOLS), str(TOOLS.parent), os.environ.get("PYTHONPATH", "")])
    process = subprocess.Popen(
        [sys.executable, "-c", RUN, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        start_new_session=True,
        stdout=subprocess.DEVNULL,
    )
    kept, until = tmp_path / "kept.jsonl", time.monotonic() + 600
    try:
        while not kept.exists() or len(kept.read_text().splitlines()) < 2:
            assert process.poll() is None
            assert time.monotonic() < until
            time.sleep(0.05)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert ran(tmp_path) == ["one 0", "two 0"]
    (tmp_path / "go").touch()
    results = finish(cells("stuck_at_first"), Kept(kept), str(tmp_path), workers=1)
    assert ran(tmp_path) == ["one 0", "two 0", "last 0"]
    assert results == {
        ("one", "c", 0): {"value": 3.0},
        ("two", "c", 0): {"value": 3.0},
        ("last", "c", 0): {"value": 4.0},
    }
    finish(cells("stuck_at_first"), Kept(kept), str(tmp_path), workers=1)
    assert len(ran(tmp_path)) == 3


def test_half_a_line_is_no_cell_and_spoils_none(tmp_path: Path) -> None:
    path = tmp_path / "kept.jsonl"
    first, second, third = cells()
    Kept(path).keep(first, {"value": 1.0})
    with path.open("a") as file:
        file.write('{"row": "two", "comm')
    kept = Kept(path)
    assert kept.find(first) == {"value": 1.0}
    assert kept.find(second) is None
    kept.keep(third, {"value": 2.0})
    again = Kept(path)
    assert [again.find(cell) for cell in (first, second, third)] == [{"value": 1.0}, None, {"value": 2.0}]


def test_what_makes_another_cell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An override, a seed, a file, another measurement, other sources; not its name in the table."""
    cell, *_ = cells()
    Kept(tmp_path / "kept.jsonl").keep(cell, {"value": 1.0})
    kept = Kept(tmp_path / "kept.jsonl")
    assert kept.find(replace(cell, row="renamed")) is not None
    for change in (
        {"overrides": {"n": 1}},
        {"seed": 1},
        {"files": ("fedprox.yaml",)},
        {"measure": "made_up_cells:failing"},
    ):
        assert kept.find(replace(cell, **change)) is None
    monkeypatch.setattr(table_cells, "source_version", lambda: "another")
    assert Kept(tmp_path / "kept.jsonl").find(cell) is None
    assert Kept(tmp_path / "kept.jsonl", any_version=True).find(cell) is not None


def test_a_file_that_changes_is_another_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table_cells, "CONFIGS", tmp_path)
    (tmp_path / "fedavg.yaml").write_text("federation: {server_lr: 1.0}")
    cell, *_ = cells()
    before = table_cells.version(cell)
    (tmp_path / "fedavg.yaml").write_text("federation: {server_lr: 0.5}")
    assert table_cells.version(cell) != before


@pytest.mark.slow
def test_a_kept_cell_of_another_experiment_is_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command, the files and flsv's sources are the same; the code of the user's own class is not."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")
    code = "from flsv.aggregation import FedAvg\nclass MyFedAvg(FedAvg):\n    pass\n"
    (tmp_path / "my_aggregator.py").write_text(code)
    overrides = {"federation.aggregator": "my_aggregator.MyFedAvg", "trainer.max_epochs": 1}
    cell = Cell("mine", "digits", 0, ("digits.yaml",), overrides, "made_up_cells:accuracy")

    def finished() -> int:
        # A process of its own sees the module as it is now.
        finish([cell], Kept(tmp_path / "kept.jsonl"), str(tmp_path), workers=1)
        return len((tmp_path / "kept.jsonl").read_text().splitlines())

    assert [finished(), finished()] == [1, 1]
    (tmp_path / "my_aggregator.py").write_text(code.replace("pass", "another = True"))
    assert [finished(), finished()] == [2, 2]


def test_other_files_of_data_are_another_version(tmp_path: Path) -> None:
    cell, *_ = cells()
    mnist, digits = (replace(cell, overrides={"data.source": source}) for source in ("mnist", "digits"))
    roots = [tmp_path / "one", tmp_path / "two"]
    for root, pixels in zip(roots, (b"0", b"1")):
        (root / "MNIST/raw").mkdir(parents=True)
        (root / "MNIST/raw/train-images-idx3-ubyte").write_bytes(pixels)
    Kept(tmp_path / "kept.jsonl", root=str(roots[0])).keep(mnist, {"value": 1.0})
    Kept(tmp_path / "kept.jsonl", root=str(roots[0])).keep(digits, {"value": 2.0})
    same, other = (Kept(tmp_path / "kept.jsonl", root=str(root)) for root in roots)
    assert (same.find(mnist), same.find(digits)) == ({"value": 1.0}, {"value": 2.0})
    assert (other.find(mnist), other.find(digits)) == (None, {"value": 2.0})


@pytest.mark.slow
def test_one_that_fails_is_named_and_the_others_are_kept(tmp_path: Path) -> None:
    kept = tmp_path / "kept.jsonl"
    with pytest.raises(CellsFailed, match=r"1 of 3 cells failed, the first:\nbad, c, seed 0: no such thing"):
        finish(cells("failing", ["one", "bad", "last"]), Kept(kept), str(tmp_path), workers=1)
    assert {json.loads(line)["row"] for line in kept.read_text().splitlines()} == {"one", "last"}


def test_two_cells_of_one_name(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="same row, column and seed"):
        finish(cells(rows=["one", "one"]), Kept(tmp_path / "kept.jsonl"), str(tmp_path))


@pytest.mark.slow
def test_two_ranks_share_the_cells(tmp_path: Path) -> None:
    """One cell is kept at rank 1 and one fails; the others are dealt out, and rank 0 has all in the end."""
    first, second = (cells("of_rank", ["a", "b", "c"])[n] for n in (0, 1))
    Kept(tmp_path / "1" / "kept.rank1.jsonl").keep(second, {"value": -1.0})
    printed = on_two_ranks(tmp_path)
    for text in printed:
        assert "CellsFailed 1 of 4 cells failed, the first:\nbad, c, seed 0: no such thing" in text
    (seconds,) = re.findall(r"^(\d+) s of CPU time for 2 cells$", printed[0], re.MULTILINE)
    assert 2 <= int(seconds) < 10  # of both ranks, without the cell that failed
    assert "CPU time" not in printed[1]
    # Every cell once, by processes that are no ranks.
    assert sorted(ran(tmp_path)) == ["a 0 alone", "c 0 alone"]
    merged = Kept(tmp_path / "0" / "kept.jsonl")
    assert [merged.find(cell) for cell in cells("of_rank", ["a", "b", "c"])] == [
        {"value": 1.0},
        {"value": -1.0},
        {"value": 1.0},
    ]
    assert merged.find(first) == {"value": 1.0}
    assert not (tmp_path / "1" / "kept.jsonl").exists()
    kept_at_1 = (tmp_path / "1" / "kept.rank1.jsonl").read_text().splitlines()
    assert [json.loads(line)["row"] for line in kept_at_1] == ["b", "c"]


def test_what_ranks_have_left_counts_without_them(tmp_path: Path) -> None:
    first, second, third = cells()
    kept = Kept(tmp_path / "kept.jsonl")
    kept.keep(first, {"value": 1.0})
    kept.of_rank(1).keep(second, {"value": 2.0})
    kept.of_rank(2).keep(first, {"value": 3.0})
    again = Kept(tmp_path / "kept.jsonl")
    assert [again.find(cell) for cell in (first, second, third)] == [{"value": 1.0}, {"value": 2.0}, None]
    assert again.of_rank(0) is again
    assert again.of_rank(3).find(second) == {"value": 2.0}


def test_ranks_with_other_cells_are_refused(tmp_path: Path) -> None:
    class Differing(Ranks):
        size = 2

        def everybody(self, value: Any, about: str) -> list[Any]:
            return [value, value[:-1]]

    with pytest.raises(ValueError, match=r"ranks \[1\] have other cells, or other sources, than rank 0"):
        finish(cells(), Kept(tmp_path / "kept.jsonl"), str(tmp_path), ranks=Differing())
    assert ran(tmp_path) == []
