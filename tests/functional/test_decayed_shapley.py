"""The final formula of Guo's Algorithm 1 against plain Python, and the rounds in which it has no meaning."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from flsv.functional.over_rounds import round_factor
from flsv.metrics import DecayedShapley

NAN = float("nan")


def decayed(rows: Tensor, *arguments: Any, **options: Any) -> tuple[Tensor, int, int]:
    """The metric's values of rounds whose Shapley values are these, NaN outside the cohort; rounds skipped, flagged."""
    metric = DecayedShapley(rows.shape[1], *arguments, **options)
    metric.set_dtype(torch.float64)
    for index, row in enumerate(rows.double()):
        ids = (~row.isnan()).nonzero().flatten()
        if len(ids):
            metric.update(ids, index, lambda masks, worth=row[ids]: masks.double() @ worth)
    return metric.compute(), int(metric.skipped), int(metric.flagged)


@pytest.mark.parametrize("decay", [0.3, 0.8, 1.0])
def test_against_the_formula(decay: float) -> None:
    rows = torch.rand(6, 4, generator=torch.Generator().manual_seed(0)) + 0.1
    expected = [sum(decay ** (t + 1) * float(row[i] / row.sum()) for t, row in enumerate(rows)) for i in range(4)]
    values, skipped, flagged = decayed(rows, decay)
    assert values.tolist() == pytest.approx(expected)
    assert (skipped, flagged) == (0, 0)
    assert values.sum().item() == pytest.approx(sum(decay**t for t in range(1, 7)))


def test_without_normalization_a_round_counts_by_what_it_gains() -> None:
    rows = torch.tensor([[0.4, 0.3], [-0.1, 0.0], [NAN, 0.2], [0.0, 0.0]])
    values, skipped, flagged = decayed(rows, decay=0.5, normalize=False)
    assert values.tolist() == pytest.approx([0.2 - 0.025, 0.15 + 0.025])
    assert (skipped, flagged) == (1, 1)


def test_a_round_without_anything_is_skipped_and_keeps_its_place() -> None:
    rows = torch.tensor([[0.0, 0.0], [0.2, 0.2]])
    values, skipped, flagged = decayed(rows, decay=0.5)
    assert values.tolist() == [0.125, 0.125]  # decay^2
    assert (skipped, flagged) == (1, 0)
    assert decayed(torch.full((3, 2), 1e-12))[0].tolist() == [0, 0]


@pytest.mark.parametrize("row", [[0.1, -0.3], [0.2, -0.2], [-0.1, -0.1], [1 / 3, 1 / 3, -2 / 3]])
def test_a_round_that_gains_nothing_keeps_its_signs_and_is_flagged(row: list[float]) -> None:
    values, skipped, flagged = decayed(torch.tensor([row]), decay=1.0)
    assert values.abs().sum().item() == pytest.approx(1)
    assert values.sign().tolist() == torch.tensor(row).sign().tolist()
    assert (skipped, flagged) == (0, 1)


def test_clients_outside_the_cohort() -> None:
    rows = torch.tensor([[0.3, NAN, 0.1, NAN], [NAN, NAN, 0.5, -0.1], [NAN] * 4])
    values = decayed(rows, decay=0.5)[0]
    expected = torch.tensor([0.375, NAN, 0.125 + 0.3125, -0.0625], dtype=torch.float64)
    torch.testing.assert_close(values, expected, equal_nan=True)


def test_threshold() -> None:
    rows = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
    assert decayed(rows, 0.5, threshold=0.25)[0].tolist() == [0.75, 0]
    assert decayed(rows, 0.5, threshold=0.26)[0].tolist() == [0.5, 0]
    assert [round_factor(t, 0.5, 0.2) for t in range(3)] == [0.5, 0.25, 0.0]
