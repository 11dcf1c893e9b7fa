"""Figure 3 of ShapFed, at the size of a test, and the report of the table tool."""

from __future__ import annotations

import importlib
import os
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch

ROOT = os.environ.get("FLSV_DATA_ROOT")


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    return importlib.import_module("shapfed_table")


@pytest.fixture(autouse=True)
def seed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")  # to be restored: seed_everything sets it


@pytest.mark.parametrize("seed", [0, 1])
def test_figure_3(tool: ModuleType, seed: int) -> None:
    """CSSV's block structure, and its agreement with the true class-wise Shapley values over the 16 cells."""
    result = tool.figure_3(seed)
    assert result.cssv.shape == result.true.shape == (4, 4)
    assert result.gap >= 0.3
    assert result.correlation >= 0.9
    own = torch.block_diag(torch.ones(2, 2), torch.ones(2, 2)).bool()
    assert result.true[own].min() > result.true[~own].max()


def test_gap_and_correlation(tool: ModuleType) -> None:
    own = torch.block_diag(torch.ones(2, 2), torch.ones(2, 2))
    assert tool.Figure3(own - 0.25, own).gap == pytest.approx(1.0)
    assert tool.Figure3(own - 0.25, 3 * own).correlation == pytest.approx(1.0)
    lopsided = own.clone()
    lopsided[2:, 2:] = 0.5
    lopsided[:2, 2:] = 0.1
    assert tool.Figure3(lopsided, own).gap == pytest.approx(0.4)


def test_report_of_figure_3(tool: ModuleType) -> None:
    setting = replace(tool.FIGURE_3, rounds=1, local_epochs=1)
    results = {("figure 3", "", seed): tool.figure_3(seed, setting) for seed in (0, 1)}
    text = tool.report("figure 3", setting, results)
    assert text.startswith("## Figure 3")
    assert text.count("| client 0 |") == 2


def test_the_six_clinics_share_everything_unequally(tool: ModuleType) -> None:
    scenario = tool.yaml.safe_load((tool.SCENARIOS / "shapfed_ham10000.yaml").read_text())
    matrix = torch.tensor(scenario["data"]["partitioner"]["init_args"]["matrix"])
    assert matrix.shape == (6, 7)
    torch.testing.assert_close(matrix.sum(0), torch.ones(7))
    sizes = matrix @ torch.tensor([231.0, 361, 771, 81, 781, 4694, 101])  # HAM10000's training images
    assert (sizes.diff() < 0).all()
    assert sizes[0] > 20 * sizes[-1]


def test_full_settings_are_the_papers(tool: ModuleType) -> None:
    chest, *_, ham = (tool.full(setting) for setting in tool.TABLES.values())
    assert (chest.network, chest.rounds, chest.lr, chest.momentum, chest.weight_decay) == (
        "shapfed_cnn",
        50,
        0.01,
        0.9,
        5e-4,
    )
    assert (ham.network, ham.rounds, ham.lr, ham.samples) == ("timm:efficientnet_b0", 200, 0.01, None)
    cifar = tool.full(tool.TABLES["CIFAR-10, imbalanced"])
    assert (cifar.network, cifar.rounds, cifar.lr, cifar.momentum) == ("resnet34_small", 50, 0.01, 0.0)


@pytest.mark.skipif(
    ROOT is None or not Path(ROOT, "pneumoniamnist.npz").is_file(), reason="FLSV_DATA_ROOT has no pneumoniamnist.npz"
)
def test_a_table_and_figure_5_on_chest_xrays(tool: ModuleType) -> None:
    name = "Chest X-ray, heterogeneous"
    setting = replace(tool.TABLES[name], rounds=1)
    results = {
        (name, method, 0): tool.work((name, method, 0), settings={name: setting}, root=ROOT) for method in tool.METHODS
    }
    text = tool.report(name, setting, results)
    for method in tool.METHODS:
        assert text.count(f"| {method} |") == 2
    figure = tool.figure_5(0, replace(tool.FIGURE_5, rounds=1), ROOT)
    assert figure.true.shape == (5,)
    assert "| cgsv |" in tool.report_figure_5([figure])
