"""What noise leaves of contributions, at the size of a test."""

from __future__ import annotations

import importlib
from dataclasses import replace
from types import ModuleType

import pytest
import torch


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    return importlib.import_module("privacy_contributions")


def test_likeness_and_interval(tool: ModuleType) -> None:
    values = torch.tensor([0.1, 0.5, 0.3])
    assert tool.likeness(values, 2 * values) == pytest.approx(1)
    assert tool.likeness(values, -values) == pytest.approx(-1)
    assert tool.likeness(values, torch.ones(3)) == 0
    assert tool.likeness(values, torch.tensor([1.0, float("nan"), 2.0])) == 0
    assert tool.interval([0.5]) == "0.50"
    # Student's t with two degrees of freedom: 4.303 * 0.1 / sqrt(3).
    assert tool.interval([0.1, 0.2, 0.3]) == "0.20 [-0.05, 0.45]"
    assert tool.interval([1.0, 0.0, 1.0]).endswith("1.00]")


def test_only_the_noise_differs(tool: ModuleType) -> None:
    setting = replace(tool.SETTINGS["digits"], clients=3, samples=300, rounds=2, min_samples=5)
    job = ("digits", None, 0)
    free = tool.work(job, {"digits": setting}, "data")
    weak = tool.train(setting, 1e-6, 0, "data")
    strong = tool.train(setting, 5.0, 0, "data")
    assert strong.accuracy < free.accuracy
    for metric, values in free.values.items():
        assert values.shape == (3,)
        torch.testing.assert_close(weak.values[metric], values, atol=0.02, rtol=0.05)
    results = {job: free, ("digits", 5.0, 0): strong, ("digits", tool.AGAIN, 0): weak}
    lines = tool.report("digits", setting, results).splitlines()
    assert lines[6].startswith("| no privacy | ∞ | 1 | 1 | 1 | 1 |")
    assert lines[7].startswith("| sigma = 5 | ")
    assert lines[-1].startswith("| numbers of samples, no values | - |")
