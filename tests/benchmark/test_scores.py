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
def test_scipy_and_scikit_learn_say_the_same(seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    exact, ties = torch.randn(2, 8, generator=draw), torch.randn(2, 8, generator=draw).round()
    for a, b in (exact, ties):
        assert spearman(a, b) == pytest.approx(stats.spearmanr(a, b).statistic, abs=1e-6)
        assert pearson(a, b) == pytest.approx(stats.pearsonr(a, b).statistic, abs=1e-6)
        bad = torch.arange(8) % 3 == 0
        assert auroc(a, bad) == pytest.approx(roc_auc_score(bad, -a))


def test_values_that_say_nothing() -> None:
    truth = torch.tensor([1.0, 2.0, 3.0])
    assert spearman(torch.ones(3), truth) == pearson(torch.full((3,), 0.1), truth) == 0
    assert spearman(torch.full((3,), NAN), truth) == 0
    assert math.isnan(auroc(truth, torch.zeros(3, dtype=torch.bool)))


def test_who_has_no_value_is_last() -> None:
    truth = torch.tensor([1.0, 2.0, 3.0])
    filled = spearman(torch.tensor([2.0, 2, 3]), truth)
    assert spearman(torch.tensor([NAN, 2.0, 3.0]), truth) == pytest.approx(filled)
    assert auroc(torch.tensor([0.1, 0.5, NAN]), torch.tensor([False, False, True])) == 0.75  # equal to the least
    assert pearson(1e-9 * truth, truth) == pytest.approx(1)  # small values are values


def test_shares_pay_nobody_for_harm() -> None:
    assert shares(torch.tensor([-5.0, 1.0, 3.0])).tolist() == [0, 0.25, 0.75]
    assert shares(torch.tensor([-5.0, -1.0])).tolist() == [0.5, 0.5]
    assert share_error(torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0])) == 1
