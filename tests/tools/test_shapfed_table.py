"""ShapFed's figures and tables at the size of a test: the runs, what is said of them, and the settings."""

from __future__ import annotations

import importlib
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from run_table import cells

pytestmark = pytest.mark.slow

NAMES = ("shapfed_federation", "shapfed_report", "table_runs", "table_presets")


@pytest.fixture(scope="module")
def tool() -> SimpleNamespace:
    """What the tool's files define."""
    parts = [vars(importlib.import_module(name)) for name in NAMES]
    return SimpleNamespace(**{name: value for part in parts for name, value in part.items()})


@pytest.fixture(autouse=True)
def seed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")  # to be restored: seed_everything sets it


def cell_of(tool: SimpleNamespace, row: str, column: str, **overrides: Any) -> Any:
    (cell,) = (each for each in cells("shapfed", False, [0]) if (each.row, each.column) == (row, column))
    return replace(cell, overrides={**cell.overrides, **overrides})


def on_digits(tool: SimpleNamespace, row: str, rounds: int) -> Any:
    few = {
        "data.source": "digits",
        "trainer.max_epochs": rounds,
        "data.splits.max_samples": 200,
        "data.loader.eval_batch_size": 50,
    }
    return cell_of(tool, row, "CIFAR-10, imbalanced", **few, **{"model.init_args.network": "softmax"})


def test_figure_3(tool: SimpleNamespace) -> None:
    """CSSV's block structure, and its agreement with the true class-wise Shapley values over the 16 cells."""
    found = tool.measure(cell_of(tool, "values", "figure 3"), "data")
    cssv, true = torch.tensor(found["cssv"]), torch.tensor(found["true"])
    assert cssv.shape == true.shape == (4, 4)
    assert tool.gap(cssv) >= 0.3
    assert tool.correlation(cssv, true) >= 0.9
    own = torch.block_diag(torch.ones(2, 2), torch.ones(2, 2)).bool()
    assert true[own].min() > true[~own].max()


def test_gap_and_correlation(tool: SimpleNamespace) -> None:
    own = torch.block_diag(torch.ones(2, 2), torch.ones(2, 2))
    assert tool.gap(own - 0.25) == pytest.approx(1.0)
    assert tool.correlation(own - 0.25, 3 * own) == pytest.approx(1.0)
    lopsided = own.clone()
    lopsided[2:, 2:] = 0.5
    lopsided[:2, 2:] = 0.1
    assert tool.gap(lopsided) == pytest.approx(0.4)


def test_what_a_run_measures(tool: SimpleNamespace) -> None:
    """Every two rounds and after the last, on as many test batches as there are to be; class-specific values."""
    found = tool.measure(on_digits(tool, "ShapFed", 3), "data")
    assert [rounds for rounds, _ in found["curve"]] == [2, 3]
    assert found["curve"][-1][1] == {name: found[name] for name in ("received", "trained", "global")}
    assert [len(found[name]) for name in ("received", "trained", "global")] == [4, 4, 1]
    assert torch.tensor(found["cssv"]).shape == (4, 10)
    assert found["seconds"] > 0
    assert len(set(found["received"])) > 1


def test_figure_5_compares_by_pairs(tool: SimpleNamespace) -> None:
    true = [0.0, 0.2, 0.4, 0.2, 0.0]
    runs = {
        seed: {"true": true, "cssv_of_weights": true, "cgsv": [0.0, 0.2 + seed, 0.4, 0.2, 0.0], "cssv": true[::-1]}
        for seed in (0, 1)
    }
    text = tool.figure_5(runs)
    assert (
        "| cssv of weights | 0.000 ± 0.000 | 0.200 ± 0.000 | 0.400 ± 0.000 | 0.200 ± 0.000 | 0.000 ± 0.000 | 1.00"
        in text
    )
    assert "| 2/2 | 2/2 |" in text
    assert "| 1/2 | 2/2 |" in text  # CGSV's second run has P2 first
