"""FedBary's comparison, at the size of a test, and its report."""

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
    return importlib.import_module("fedbary_table")


@pytest.fixture
def setting(tool: ModuleType) -> object:
    return replace(tool.Setting(), protocol_samples=20, time_samples=30, time_clients=(1, 2, 3), time_supports=(5,))


def test_protocol(tool: ModuleType, setting: object, tmp_path: Path) -> None:
    jobs = [("protocol", "normal", 0), ("protocol", "barycentre", 0)]
    results = {job: tool.work(job, setting, "") for job in jobs}
    errors = results[jobs[0]][0]["errors"]
    assert abs(errors[1][-1]) < 1e-3
    assert errors[10][-1] > errors[1][-1]
    text = tool.report("protocol", results, setting, tmp_path / "barycentre.png")
    assert "not met" not in text
    assert (tmp_path / "barycentre.png").stat().st_size > 1000
    results[jobs[0]][0]["errors"][1][-1] = 0.5
    assert "**not met**: normal: S = m within 1e-3" in tool.report("protocol", results, setting)


def test_time(tool: ModuleType, setting: object) -> None:
    jobs = tool.PARTS["time"].jobs(setting, [0])
    results = {job: tool.work(job, setting, "") for job in jobs}
    assert len(results) == 3
    assert "| S = 5 |" in tool.report("time", results, setting)
    slow = {("time", 100, n): ({"seconds": 2.0 * n}, 0.0) for n in (5, 10, 50, 100)}
    text = tool.report("time", slow, tool.Setting())
    assert "- met: S = 100: linear in n, R^2 at least 0.98: 1.0000" in text
    assert "**not met**: n = 100, S = 100 in less than 120 s: 200.0 s" in text


def test_scores(tool: ModuleType) -> None:
    bad = torch.tensor([True, False, False, False])
    found = tool.fedbary_detection.scores(bad, torch.tensor([5.0, 1.0, -2.0, -2.0]))
    assert (found["auroc"], found["positive precision"], found["positive recall"]) == (1.0, 0.5, 1.0)


def test_detection_report(tool: ModuleType) -> None:
    part = tool.fedbary_detection
    numbers = {"auroc": 0.96}
    numbers |= {f"{rule} {what}": 0.5 for rule in ("positive", "outlier") for what in ("precision", "recall")}
    keys = [(noise, name, rate) for noise, names in part.FEATURES.items() for name in names for rate in part.RATES]
    result = {key: dict.fromkeys(part.METHODS, numbers) for key in keys}
    text = tool.report("detection", {("detection", "mnist", 0): (result, 1.0)}, tool.Setting())
    assert "**not met**: feature noise, mnist, pixels: AUROC at least 0.98" in text
    assert "- met: label flips, mnist, learned: AUROC at least 0.95" in text


def test_contributions_report(tool: ModuleType) -> None:
    def result(values: list[float]) -> tuple[dict, float]:
        return {"distances": [1.0, 1, 1, 1, 2], "values": {"FedBary": values}, "seconds": {"FedBary": 1.0}}, 1.0

    shares = [0.3, 0.25, 0.2, 0.15, 0.1]
    results = {
        ("contributions", case, "cifar10", 0): result(shares) for case in ("1 same", "4 label noise", "no validation")
    }
    text = tool.report("contributions", results, tool.Setting())
    assert "**not met**: cifar10, case 1 same" in text
    assert "- met: cifar10, case 4 label noise" in text
    assert "- met: cifar10, no validation" in text


def test_removal_report(tool: ModuleType) -> None:
    copies = {"once": 2.0, "three times": 2.0, "+1": 2.1, "+50": 2.2, "+200": 2.15}
    text = tool.report("removal", {("removal", "duplicates", "cifar10", 0): (copies, 1.0)}, tool.Setting())
    assert "- met: duplication: three times the set" in text
    assert "**not met**: duplication: copies of one sample" in text


@pytest.mark.skipif(
    ROOT is None or not Path(ROOT, "FashionMNIST").is_dir(), reason="FLSV_DATA_ROOT has no Fashion-MNIST"
)
def test_detection_and_removal(tool: ModuleType) -> None:
    setting = replace(tool.Setting(), samples=100, validation=100, support=20, iterations=2, epochs=1, components=8)
    found, _ = tool.work(("detection", "fashion_mnist", 0), setting, ROOT)
    assert found["feature noise", "pixels", 0.3]["ours"]["auroc"] > 0.95
    curves, _ = tool.work(("removal", "points", "fashion_mnist", 0), setting, ROOT)
    assert all(len(curve) == 7 for curve in curves.values())
