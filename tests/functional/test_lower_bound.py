"""Lower confidence bounds against SciPy's intervals."""

from __future__ import annotations

import pytest
import torch
from scipy import stats

from flsv.functional import lower_bound


@pytest.mark.parametrize("confidence", [0.5, 0.8, 0.95])
@pytest.mark.parametrize("c", [2, 3, 20])
def test_the_bound_of_a_t_interval(c: int, confidence: float) -> None:
    values = torch.randn(c, 4, generator=torch.Generator().manual_seed(c), dtype=torch.float64)
    mean, squares = values.mean(0), (values - values.mean(0)).square().sum(0)
    found = lower_bound(torch.full((4,), c), mean, squares, confidence=confidence)
    for column, bound in zip(values.T.numpy(), found.tolist()):
        expected = stats.t.interval(2 * confidence - 1, c - 1, column.mean(), stats.sem(column))[0]
        assert bound == pytest.approx(expected if confidence > 0.5 else column.mean())


def test_it_covers() -> None:
    draw = torch.Generator().manual_seed(0)
    values = 1 + torch.randn(6, 4000, generator=draw, dtype=torch.float64)
    squares = (values - values.mean(0)).square().sum(0)
    bound = lower_bound(torch.full((4000,), 6), values.mean(0), squares, confidence=0.9)
    assert (bound <= 1).double().mean().item() == pytest.approx(0.9, abs=0.02)
