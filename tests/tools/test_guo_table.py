"""Guo et al.'s comparison at the size of a test, its checks, and its report."""

from __future__ import annotations

import importlib
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from run_table import cells

pytestmark = pytest.mark.slow

NAMES = ("guo_federation", "guo_report", "table_runs", "table_presets")

LR, ROUNDS = "model.init_args.optimizer.init_args.lr", "trainer.max_epochs"
TOTAL, VALIDATION = "data.partitioner.init_args.total", "data.splits.server_val"
PAPER_A, PAPER_B = (0.2, 0.3, 0.4, 0.5, 0.6, 0.7), (0.05, 0.1, 0.2, 0.3, 0.4)


@pytest.fixture(scope="module")
def tool() -> SimpleNamespace:
    """What the tool's files define."""
    parts = [vars(importlib.import_module(name)) for name in NAMES]
    return SimpleNamespace(**{name: value for part in parts for name, value in part.items()})


@pytest.fixture(autouse=True)
def seed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")  # to be restored: seed_everything sets it


def cell_of(tool: SimpleNamespace, row: str, column: str, **overrides: Any) -> Any:
    """Of MNIST's and softmax regression, two rounds of 150 digits instead."""
    (cell,) = (each for each in cells("guo", False, [0]) if (each.row, each.column) == (row, column))
    few = {"data.source": "digits", "data.batch_size": 10, TOTAL: 150, VALIDATION: 0.1, ROUNDS: 2}
    metrics = cell.overrides["federation.metrics"]
    if "OR" in metrics:
        game = {**metrics["OR"], "init_args": {**metrics["OR"]["init_args"], "rounds": 2}}
        few["federation.metrics"] = {**metrics, "OR": game}
    return replace(cell, overrides={**cell.overrides, **few, LR: 0.1, **overrides})


def test_all_algorithms_in_one_scenario(tool: SimpleNamespace, tmp_path: Path) -> None:
    column = "mnist, softmax, biased"
    mine = [cell_of(tool, row, column) for row in ("ours", "rebuilt", "retrained")]
    results = {cell.key: tool.measure(cell, "data") for cell in mine}
    found = tool.found(results, column)
    assert tuple(found) == tool.ALGORITHMS
    by_name = {name: seeds[0] for name, seeds in found.items()}
    for said in by_name.values():
        assert len(said["values"]) == 5
        assert torch.tensor(said["values"]).isfinite().all()
        assert said["training"] > 0
        assert said["valuation"] > 0
    assert (by_name["exact"]["coalitions"], by_name["exact"]["trainings"]) == (32, 30)
    assert by_name["K-subset"]["trainings"] <= tool.K_SUBSET_BUDGET
    assert by_name["TMC"]["trainings"] < 30
    assert by_name["OR"]["coalitions"] == 32
    assert {by_name[name]["coalitions"] for name in ("SOR", "MR", "TMR", tool.OURS, tool.OURS_FIXED)} == {2 * 32}
    rows = torch.tensor(by_name["MR"]["rows"])
    total, absolute = rows.sum(1, keepdim=True), rows.abs().sum(1, keepdim=True)
    shares = rows / torch.where(total < 1e-6, absolute, total)
    expected = {"SOR": rows.sum(0), "MR": shares.sum(0), "TMR": 0.8 * shares[0] + 0.64 * shares[1]}
    for name, values in expected.items():
        torch.testing.assert_close(torch.tensor(by_name[name]["values"]), values)
    own = torch.tensor(by_name[tool.OURS]["rows"])
    raw = torch.tensor(by_name[tool.OURS_RAW]["values"])
    torch.testing.assert_close(raw, 0.8 * own[0] + 0.64 * own[1])
    assert by_name["exact"]["accuracy"] == by_name["MR"]["accuracy"]
    # The grand coalition, retrained, is the FedAvg run: what all of them together gain is the same.
    assert sum(by_name["exact"]["values"]) == pytest.approx(float(rows.sum()), abs=1e-6)
    text = tool.report(results, mine)
    for algorithm in tool.ALGORITHMS:
        assert text.count(f"\n| {algorithm} |") == 3 + (algorithm in (tool.OURS, tool.OURS_FIXED, tool.OURS_RAW))
    tool.draw_all(results, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["guo_mnist.png"]
    assert [len(ax.lines) for ax in tool.draw(results, "mnist").axes] == [1, 1, 1, 6, 1]


@pytest.mark.parametrize(
    ("scenario", "values", "met"),
    [
        ("same", [1.0, 0.95, 0.91, 1.0, 0.93], True),
        ("same", [1.0, 0.95, 0.89, 1.0, 0.93], False),
        ("same", [-0.1, 0.1, 0.1, 0.1, 0.1], False),
        ("same", [0.0] * 5, True),
        ("sizes", [0.1, 0.2, 0.3, 0.31, 0.5], True),
        ("sizes", [0.1, 0.3, 0.2, 0.4, 0.5], False),
        ("sizes", [0.1] * 5, False),
        ("noisy", [0.5, 0.4, 0.3, 0.2, 0.1], True),
        ("noisy", [0.5, 0.4, 0.4, 0.2, 0.1], False),
        ("mixtures", [0.3, 0.3, 0.3, 0.1, 0.01], True),
        ("mixtures", [0.3, 0.3, 0.3, 0.1, -0.01], False),
        ("biased", [0.10, 0.11, 0.12, 0.1, 0.5], True),
        ("biased", [0.10, 0.11, 0.15, 0.1, 0.5], False),
        ("biased", [0.10, 0.11, 0.12, 0.1, 0.05], False),
        ("biased", [-0.10, -0.11, -0.12, -0.1, 0.5], False),
    ],
)
def test_checks(tool: SimpleNamespace, scenario: str, values: list[float], met: bool) -> None:
    assert tool.check(scenario, values)[0] is met


def test_a_check_says_not_met_and_counts_the_seeds(tool: SimpleNamespace) -> None:
    runs = [[1.0] * 5, [1.0] * 5, [0.2, 1.0, 1.0, 1.0, 1.0]]
    assert tool.verdict("same", runs) == "not met: 27 % apart (2/3)"
    assert tool.verdict("sizes", [[0.1, 0.2, 0.3, 0.4, 0.5]]) == "met: 4 of 4 steps up (1/1)"
    results = {}
    for source, values in (("mnist", [0.2] * 5), ("fashion_mnist", [0.1, 0.3, 0.2, 0.2, 0.2])):
        said = {"values": values, "valuation": 1.0, "coalitions": 640, "trainings": 0, "rows": [values]}
        of_run = {"accuracy": 90.0, "training": 1.0, "algorithms": {tool.OURS: said}}
        results["ours", f"{source}, softmax, same", 0] = of_run
    text = tool.report(results, [])
    assert f"| {tool.OURS} | 1 of 2 (1 of 2 runs) |" in text
    assert "not met: 67 % apart (0/1)" in text


@pytest.mark.parametrize(
    ("scenario", "values", "number"),
    [
        ("same", [1.0, 0.9, 1.0, 1.0, 1.0], -10.0),
        ("sizes", [0.1, 0.2, 0.3, 0.4, 0.5], 1.0),
        ("sizes", [0.2, 0.1, 0.3, 0.4, 0.5], 0.9),  # 1 - 6 (1 + 1) / (5 (25 - 1))
        ("sizes", [0.2] * 5, 0.0),
        ("noisy", [0.5, 0.4, 0.3, 0.2, 0.1], 1.0),
        ("mixtures", [0.3, 0.3, 0.3, 0.2, -0.1], -0.1),
        ("biased", [0.3, 0.1, 0.1, 0.1, 0.4], 0.1),
    ],
)
def test_agreement(tool: SimpleNamespace, scenario: str, values: list[float], number: float) -> None:
    assert tool.agreement(scenario, values) == pytest.approx(number)


def test_gains_are_by_pairs(tool: SimpleNamespace) -> None:
    """The seeds differ by 20 points, the rows by 1.0 and 1.2 in each: an interval of Student's t with one degree."""
    results = {}
    for row, lift in (("ours", (1.0, 1.2)), ("rebuilt", (0.0, 0.0))):
        for seed in (0, 1):
            results[row, "mnist, softmax, biased", seed] = {"accuracy": 50 + 20 * seed + lift[seed]}
    difference = tool.gain(results, "mnist, softmax, biased", "ours", "rebuilt")
    assert difference.mean == pytest.approx(1.1)
    assert difference.high - difference.mean == pytest.approx(12.706 * 0.1, rel=1e-3)
    assert difference.verdict == "not told apart"
    assert "| mnist, softmax | - | - | - | +1.10 [-0.17, +2.37], p = 0.058 | - |" in tool.report_gains(results)


@pytest.mark.filterwarnings("ignore:LightningCLI")
def test_class_ordered_batches(tool: SimpleNamespace) -> None:
    with tool.built(cell_of(tool, "rebuilt", "mnist, softmax, same"), "data") as cli:
        data = cli.datamodule
        data.__class__ = tool.ClassOrdered
        data.setup("fit")
        first, again = ([y for _, y in data.client_loader(2)] for _ in range(2))
        assert all(torch.equal(a, b) for a, b in zip(first, again))
        assert (torch.cat(first).diff() >= 0).all()
        assert [len(y) for y in first] == [10, 10, 10]
        assert torch.equal(torch.bincount(torch.cat(first), minlength=10), data.class_counts[2])


@pytest.mark.filterwarnings("ignore:LightningCLI")
def test_scenarios_are_those_of_the_files(tool: SimpleNamespace) -> None:
    for scenario in ("sizes", "noisy"):
        with tool.built(cell_of(tool, "rebuilt", f"mnist, softmax, {scenario}", **{TOTAL: 500}), "data") as cli:
            cli.datamodule.setup("fit")
            if scenario == "sizes":
                assert cli.datamodule.num_samples.tolist() == [50, 75, 100, 125, 150]
            else:
                assert cli.datamodule.malicious == [1, 2, 3, 4]


def test_retrained_coalitions_are_counted(tool: SimpleNamespace) -> None:
    """The estimate for a GPU counts the trainings of coalitions, most of the work."""
    short = {TOTAL: 50, VALIDATION: 0.1, "trainer.limit_test_batches": 1}
    found = tool.counted(cell_of(tool, "retrained", "mnist, softmax, same"), short, "data")
    assert found["operators"] > 1000
    assert found["gpu_seconds"] > 0
