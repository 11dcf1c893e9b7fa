"""FedBary's comparison, at the size of a test, and its report."""

from __future__ import annotations

import importlib
import os
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.slow

ROOT = os.environ.get("FLSV_DATA_ROOT")
needs_data = pytest.mark.skipif(
    ROOT is None or not Path(ROOT, "FashionMNIST").is_dir(), reason="FLSV_DATA_ROOT has no Fashion-MNIST"
)


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    return importlib.import_module("fedbary_report")


@pytest.fixture
def setting(tool: ModuleType) -> Any:
    small = {"time_samples": 30, "time_clients": (1, 2, 3), "time_supports": (5,)}
    return replace(tool.Setting(), protocol_samples=20, **small)


def run(tool: ModuleType, jobs: list[tuple], setting: Any, root: str = "") -> dict[tuple, Any]:
    return {job: tool.PARTS[job[0]].run(job, setting, root) for job in jobs}


def test_protocol(tool: ModuleType, setting: Any, tmp_path: Path) -> None:
    jobs = [("protocol", "normal", 0), ("protocol", "barycenter", 0)]
    results = run(tool, jobs, setting)
    errors = results[jobs[0]]["errors"]
    assert abs(errors["1"][-1]) < 1e-3
    assert errors["10"][-1] > errors["1"][-1]
    text = tool.of_part("protocol", results, setting, tmp_path / "barycenter.png")
    assert "not met" not in text
    assert (tmp_path / "barycenter.png").stat().st_size > 1000
    results[jobs[0]]["errors"]["1"][-1] = 0.5
    assert "**not met**: normal: S = m within 1e-3" in tool.of_part("protocol", results, setting)


def test_time(tool: ModuleType, setting: Any) -> None:
    jobs = tool.PARTS["time"].jobs(setting, [0])
    assert {job[1] for job in jobs} == {"S = 5"}  # competitors: of 5 and 10 clients
    results = run(tool, jobs, setting)
    assert len(results) == 3
    assert "| FedBary, S = 5 |" in tool.of_part("time", results, setting)
    slow = {("time", "S = 100", n, seed): {"seconds": 2.0 * n} for n in (5, 10, 50, 100) for seed in range(3)}
    slow |= {("time", "GTG", 5, seed): {"seconds": 3.0 + seed} for seed in range(3)}
    text = tool.of_part("time", slow, tool.Setting())
    assert "- met: S = 100: linear in n, R^2 at least 0.98: 1.0000" in text
    assert "**not met**: n = 100, S = 100 in less than 120 s: 200.0 s" in text
    assert "| GTG | 4.0 ± 1.0 s (33 s) | - | - | - |" in text
    # 10 - 3, 10 - 4, 10 - 5: 6, and t(0.975, 2) = 4.303 standard errors of 1 / sqrt(3) on either side.
    assert "| S = 100 minus | n = 5 | n = 10 |" in text
    assert "| GTG | **+6.00 [+3.52, +8.48]** | - |" in text


@needs_data
@pytest.mark.parametrize("name", ["MR", "exact", "DataSV"])
def test_time_of_competitors(tool: ModuleType, name: str) -> None:
    setting = replace(importlib.import_module("fedbary_jobs").SHORT, time_samples=20)
    assert tool.PARTS["time"].run(("time", name, 2, 0), setting, ROOT)["seconds"] > 0


def test_leave_one_out_is_what_refitting_without_each_sample_gives() -> None:
    from fedbary_loo import leave_one_out

    generator = torch.Generator().manual_seed(0)
    x, x2 = (torch.randn(n, 4, generator=generator, dtype=torch.float64) for n in (20, 15))
    y, y2 = (torch.randint(3, (n,), generator=generator) for n in (20, 15))
    center, constant = x.mean(0), (x - x.mean(0)).square().sum(1).mean().sqrt()
    points, others = (torch.cat([z - center, constant.expand(len(z), 1)], 1) for z in (x, x2))
    penalty = 0.5 * points.square().sum(1).mean() * torch.eye(5, dtype=torch.float64)
    targets, wanted = (torch.nn.functional.one_hot(labels, 3).double() for labels in (y, y2))

    def loss(kept: torch.Tensor) -> torch.Tensor:
        a, b = points[kept], targets[kept]
        return (others @ torch.linalg.solve(a.T @ a + penalty, a.T @ b) - wanted).square().sum()

    everyone = torch.arange(20)
    expected = torch.stack([loss(everyone) - loss(everyone[everyone != i]) for i in everyone])
    torch.testing.assert_close(leave_one_out(x, y, x2, y2, ridge=0.5), expected)


def test_all_five_potentials_are_in_the_order_of_the_clients_samples(tool: ModuleType) -> None:
    generator = torch.Generator().manual_seed(0)
    clean, other = (torch.randn(30, 3, generator=generator) for _ in range(2))
    x = clean.clone()
    x[7] += 20
    found, distances = tool.PARTS["variants"].potentials(x, other, 12, 0)
    assert {name: int(values.argmax()) for name, values in found.items()} == dict.fromkeys(found, 7)
    assert len(found) == 5
    assert len(distances) == 12
    assert tool.PARTS["variants"].potentials(clean, other, 12, 0)[1][-1] < distances[-1]


def test_scores(tool: ModuleType) -> None:
    bad = torch.tensor([True, False, False, False])
    found = tool.PARTS["detection"].scores(bad, torch.tensor([5.0, 1.0, -2.0, -2.0]))
    assert (found["auroc"], found["positive precision"], found["positive recall"]) == (1.0, 0.5, 1.0)


@needs_data
def test_detection_and_removal(tool: ModuleType) -> None:
    sizes = {"samples": 100, "validation": 100, "points": 20, "iterations": 2, "epochs": 1, "components": 8}
    setting = replace(tool.Setting(), **sizes)
    jobs = [("detection", "fashion_mnist", 0), ("removal", "points", "fashion_mnist", 0)]
    found, curves = run(tool, jobs, setting, ROOT).values()
    assert found["feature noise, pixels, 30 %"]["ours"]["auroc"] > 0.95
    assert found["feature noise, pixels, 30 %"].keys() == set(tool.PARTS["detection"].METHODS)
    assert len(curves) == 7
    assert all(len(curve) == 7 for curve in curves.values())
