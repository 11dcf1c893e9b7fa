"""What intervals cover: by hand, and of one small run."""

from __future__ import annotations

import importlib
from dataclasses import replace
from types import ModuleType

import pytest
import torch

from flsv.benchmark import federation


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    return importlib.import_module("intervals_table")


def case(tool: ModuleType, *values: float, half: float):
    value = torch.tensor(values, dtype=torch.float64)
    return tool.Case(value, value - half, value + half)


def test_the_tables_by_hand(tool: ModuleType) -> None:
    truths = {"here": torch.tensor([0.5, 0.5], dtype=torch.float64)}
    results = {
        ("here", 0, "narrow"): case(tool, 0.6, 0.4, half=0.05),
        ("here", 1, "narrow"): case(tool, 0.46, 0.54, half=0.05),
        ("here", 0, "wide"): case(tool, 0.6, 0.4, half=0.3),
        ("here", 1, "wide"): case(tool, 0.4, 0.6, half=0.3),
    }
    lines = tool.coverage(results, truths).splitlines()
    assert lines[2] == f"| narrow | 0.50 | 0.00 | 0.050 | {1.645 * 0.14 / 2**0.5:.3f} |"  # 0.6 and 0.46
    assert lines[3] == f"| wide | 1.00 | 1.00 | 0.300 | {1.645 * 0.2 / 2**0.5:.3f} |"
    lines = tool.repetition(results, truths).splitlines()
    assert lines[2] == f"| narrow | {0.03 / 0.07:.2f} |"  # the mean is 0.53 and 0.47; single runs are 0.1 and 0.04 away
    assert lines[3] == "| wide | 0.00 |"


def test_one_run(tool: ModuleType) -> None:
    """Metrics of the table that ask for different things, two rounds."""
    where = replace(federation("digits_sizes"), rounds=2)
    names = ("ClassSpecificShapley", "CumulativeShapley, permutations, 24 evaluations", "LeaveOneOut (last round)")
    found = tool.run(where, 0, {name: tool.METRICS[name] for name in names})
    assert tuple(found) == names
    for each in found.values():
        assert float(each.value.clamp(min=0).sum()) == pytest.approx(1)
        assert bool((each.low <= each.value).all())
        assert bool((each.value <= each.high).all())
    assert "| ClassSpecificShapley | " in tool.report(
        {("digits_sizes", 0, name): each for name, each in found.items()}, {"digits_sizes": torch.full((6,), 1 / 6)}, 1
    )
