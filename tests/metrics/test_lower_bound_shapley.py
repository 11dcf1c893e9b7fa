"""LowerBoundShapley: the bound of what the rounds gave, round by round."""

from __future__ import annotations

import pytest
import torch
from scipy import stats

from flsv.metrics import LowerBoundShapley


def test_the_rounds_by_hand() -> None:
    draw, metric = torch.Generator().manual_seed(0), LowerBoundShapley(5, confidence=0.8)
    seen: dict[int, list[float]] = {}
    for ids in ([0, 1, 2], [1, 2], [0, 2], [2, 3], [0, 3], [0, 2, 3]):
        worth = torch.randn(len(ids), generator=draw)
        metric.update(torch.tensor(ids), lambda masks, worth=worth: masks.float() @ worth)
        for i, value in zip(ids, worth.tolist()):
            seen.setdefault(i, []).append(value)
    value = metric.compute()
    assert value[4].isnan()
    for i, values in seen.items():
        mean = sum(values) / len(values)
        bound = mean - stats.t.ppf(0.8, len(values) - 1) * stats.sem(values)
        assert value[i].item() == pytest.approx(bound, abs=1e-5)
        assert metric.diagnostics()["mean"][i].item() == pytest.approx(mean, abs=1e-6)


def test_a_first_round_takes_the_estimators_error() -> None:
    def noisy(masks: torch.Tensor) -> torch.Tensor:
        return masks.double().sum(1) + (masks.double() @ torch.arange(1.0, 13.0).double()).sin()

    metric = LowerBoundShapley(12, estimator="permutation", estimator_args={"budget": 200}, confidence=0.9)
    metric.update(torch.arange(12), noisy, torch.Generator().manual_seed(0))
    below = metric.diagnostics()["mean"] - metric.compute()
    assert (below > 0).all()
    torch.testing.assert_close(below, metric.variance.sqrt().squeeze(-1) * float(stats.norm.ppf(0.9)))
