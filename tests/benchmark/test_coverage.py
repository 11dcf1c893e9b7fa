"""Coverage of intervals whose cases can be counted by hand."""

from __future__ import annotations

import math

import pytest
import torch
from small_federation import small

from flsv.benchmark.scores import Results, Values
from flsv.benchmark.summary import Known, as_shares, covered
from flsv.benchmark.truth import exact_truth

NAN = float("nan")


def known(*worth: float) -> Known:
    """A federation whose truth is an additive game: clients have 0.5, 0.3 and 0.2 of it."""
    masks = torch.tensor([[bool(mask >> i & 1) for i in range(3)] for mask in range(8)])
    utilities = (masks.double() @ torch.tensor(worth or (0.5, 0.3, 0.2), dtype=torch.float64)).expand(2, 8)
    return {"small": (small(), exact_truth((1, 2), utilities.contiguous()))}


def told(*runs: tuple[list[float], float]) -> Results:
    """Runs of seeds 0, 1, ...: values, and half the width of all their intervals."""
    results = Results(None)
    for seed, (values, half) in enumerate(runs):
        value = torch.tensor(values)
        interval = {"m": (value - half, value + half)} if half == half else {}
        results.add("small", seed, Values({"m": value}, intervals=interval))
    return results


def test_the_truth_is_held_as_a_share() -> None:
    # Shares 0.5, 0.25, 0.25 of a total of 4; half widths 0.05 as shares. True: 0.5, 0.3, 0.2.
    assert covered(told(([2.0, 1.0, 1.0], 0.2001)), known(), "m") == 1
    assert covered(told(([2.0, 1.0, 1.0], 0.19)), known(), "m") == pytest.approx(1 / 3)


def test_cases_without_an_interval_do_not_count() -> None:
    results = Results(None)
    value = torch.tensor([0.5, 0.3, 0.2])
    low, high = torch.tensor([0.4, NAN, 0.3]), torch.tensor([0.6, NAN, 0.4])
    results.add("small", 0, Values({"m": value}, intervals={"m": (low, high)}))
    assert covered(results, known(), "m") == 0.5
    assert math.isnan(covered(told(([1.0, 2.0, 3.0], NAN)), known(), "m"))


def test_without_anything_to_pay_there_is_no_share() -> None:
    interval = torch.tensor([-2.0, -2.0, -2.0]), torch.tensor([2.0, 2.0, 2.0])
    assert as_shares(torch.tensor([-1.0, -1.0, 0.0]), interval) is None
    assert math.isnan(covered(told(([-1.0, -1.0, 0.0], 2.0)), known(), "m"))
