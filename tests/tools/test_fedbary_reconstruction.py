"""The attack on FedBary's protocol, at the size of a test."""

from __future__ import annotations

import importlib
from types import ModuleType

import pytest
import torch

from flsv.functional.transport import safe_support


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = importlib.import_module("fedbary_reconstruction")
    monkeypatch.setattr(module, "ITERATIONS", (1, 3))
    monkeypatch.setattr(module, "SERVER_SAMPLES", 30)
    return module


def digits() -> tuple[torch.Tensor, torch.Tensor]:
    from sklearn.datasets import load_digits

    data = load_digits()
    return torch.tensor(data.data).float() / 16, torch.tensor(data.target)


def test_samples_are_found_with_as_many_points_as_samples_and_not_below_half(tool: ModuleType) -> None:
    x, y = digits()
    for support, exact in ((40, 1.0), (67, 0.8)):
        assert tool.attack(x, y, 40, support, seed=0)[3][0] >= exact
    found = tool.attack(x, y, 40, safe_support(40), seed=0)
    assert [found[k][:2] for k in (1, 3)] == [(0, 0), (0, 0)]
    assert tool.attack(x, y, 40, 36, seed=0)[3][1] > 0.3  # near copies, where a point is mostly one sample


def test_what_follows_from_means_for_somebody_who_knows_their_members(tool: ModuleType) -> None:
    points = torch.tensor([[0.0], [1.0], [10.0], [11.0]])
    pairs = torch.tensor([[0.0], [10.0]]), torch.tensor([[0.0], [5.0]])
    assert tool.determined([pairs], points) == 0
    whole = torch.tensor([[0.0], [1.0], [10.0], [11.0]]), points
    assert tool.determined([whole], points) == 1


def test_the_table(tool: ModuleType) -> None:
    lines = tool.run("digits", "", (20,), (0.25, 1.0), seeds=1).splitlines()
    assert lines[0] == "## digits"
    assert lines[4].startswith("| 20 | 0.25 | 5 | 0/0 | 0/0 |")
    assert lines[5] == "| 20 | 1.00 | 20 | 100/100 | 100/100 | 100/100 |"
