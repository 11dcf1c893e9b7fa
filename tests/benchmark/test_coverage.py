"""Coverage of intervals whose cases can be counted by hand."""

from __future__ import annotations

import math

import pytest
import torch
from small_federation import small

from flsv.benchmark.scores import Results, Values
from flsv.benchmark.summary import Known, covered
from flsv.benchmark.truth import exact_truth
from flsv.functional.shapley.game import all_coalitions

NAN = float("nan")


def known() -> Known:
    """A federation whose truth is an additive game: clients have 0.5, 0.3 and 0.2 of it."""
    worth = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    utilities = (all_coalitions(3).double() @ worth).expand(2, 8)
    return {"small": (small(), exact_truth((1, 2), utilities.contiguous()))}


def told(values: list[float], low: list[float], high: list[float]) -> Results:
    """One run's values and the ends of their intervals."""
    results = Results(None)
    ends = torch.tensor(low), torch.tensor(high)
    results.add("small", 0, Values({"m": torch.tensor(values)}, intervals={"m": ends}))
    return results


def test_the_truth_is_held_as_a_share() -> None:
    values = [2.0, 1.0, 1.0]
    # Shares 0.5, 0.25, 0.25 of a total of 4; half widths 0.05 as shares. True: 0.5, 0.3, 0.2.
    for half, held in ((0.2001, 1), (0.19, 1 / 3)):
        ends = ([value + sign * half for value in values] for sign in (-1, 1))
        assert covered(told(values, *ends), known(), "m") == pytest.approx(held)


def test_cases_without_an_interval_or_anything_to_pay_do_not_count() -> None:
    assert covered(told([0.5, 0.3, 0.2], [0.4, NAN, 0.3], [0.6, NAN, 0.4]), known(), "m") == 0.5
    assert math.isnan(covered(told([1.0, 2.0, 3.0], [NAN] * 3, [NAN] * 3), known(), "m"))
    assert math.isnan(covered(told([-1.0, -1.0, 0.0], [-3.0, -3.0, -2.0], [1.0, 1.0, 2.0]), known(), "m"))
