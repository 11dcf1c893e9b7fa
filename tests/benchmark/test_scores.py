"""Correlations against SciPy's, AUROC against scikit-learn's."""

from __future__ import annotations

import math

import pytest
import torch
from scipy import stats
from sklearn.metrics import roc_auc_score

from flsv.benchmark.scores import auroc, pearson, share_error, shares, spearman

NAN = float("nan")


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("ties", [False, True])
def test_scipy_says_the_same(seed: int, ties: bool) -> None:
    draw = torch.Generator().manual_seed(seed)
    a, b = torch.randn(7, generator=draw), torch.randn(7, generator=draw)
    if ties:
        a, b = a.round(), b.round()
    assert spearman(a, b) == pytest.approx(stats.spearmanr(a, b).statistic, abs=1e-6)
    assert pearson(a, b) == pytest.approx(stats.pearsonr(a, b).statistic, abs=1e-6)


@pytest.mark.parametrize("seed", range(5))
def test_auroc(seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    values, bad = torch.randn(8, generator=draw).round(decimals=1), torch.arange(8) % 3 == 0
    assert auroc(values, bad) == pytest.approx(roc_auc_score(bad, -values))


def test_values_that_say_nothing() -> None:
    truth = torch.tensor([1.0, 2.0, 3.0])
    assert spearman(torch.ones(3), truth) == pearson(torch.full((3,), 0.1), truth) == 0
    assert spearman(torch.full((3,), NAN), truth) == 0
    assert math.isnan(auroc(truth, torch.zeros(3, dtype=torch.bool)))


def test_who_has_no_value_is_last() -> None:
    values = torch.tensor([NAN, 2.0, 3.0])
    assert spearman(values, torch.tensor([1.0, 2.0, 3.0])) == pytest.approx(
        spearman(torch.tensor([2.0, 2, 3]), torch.arange(3.0))
    )
    assert auroc(torch.tensor([0.1, 0.5, NAN]), torch.tensor([False, False, True])) == 0.75  # equal to the least


def test_small_values_are_values() -> None:
    assert pearson(1e-9 * torch.tensor([1.0, 2.0, 3.0]), torch.tensor([1.0, 2.0, 3.0])) == pytest.approx(1)


def test_shares_pay_nobody_for_harm() -> None:
    assert shares(torch.tensor([-5.0, 1.0, 3.0])).tolist() == [0, 0.25, 0.75]
    assert shares(torch.tensor([-5.0, -1.0])).tolist() == [0.5, 0.5]
    assert share_error(torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0])) == 1
