"""Correlations against SciPy's, AUROC against scikit-learn's, coverage of intervals whose cases are counted by hand."""

import math

import pytest
import torch
from scipy import stats
from sklearn.metrics import roc_auc_score

from flsv.benchmark.scores import BenchResults, Values, auroc, share_error, shares, spearman
from flsv.benchmark.summary import Known, covered
from flsv.benchmark.truth import exact_truth
from flsv.functional.shapley.exact import all_coalitions
from helpers.runs import small_federation

NAN = float("nan")


@pytest.mark.parametrize("seed", range(5))
def test_scores_equal_scipys_and_scikit_learns(seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    exact, ties = torch.randn(2, 8, generator=draw), torch.randn(2, 8, generator=draw).round()
    for a, b in (exact, ties):
        assert spearman(a, b) == pytest.approx(stats.spearmanr(a, b).statistic, abs=1e-6)
        bad = torch.arange(8) % 3 == 0
        assert auroc(a, bad) == pytest.approx(roc_auc_score(bad, -a))


def test_correlation_of_constant_or_missing_values_is_zero_and_auroc_of_one_class_is_nan() -> None:
    truth = torch.tensor([1.0, 2.0, 3.0])
    assert spearman(torch.ones(3), truth) == 0
    assert spearman(torch.full((3,), NAN), truth) == 0
    assert math.isnan(auroc(truth, torch.zeros(3, dtype=torch.bool)))


def test_clients_without_a_value_rank_last() -> None:
    truth = torch.tensor([1.0, 2.0, 3.0])
    filled = spearman(torch.tensor([2.0, 2, 3]), truth)
    assert spearman(torch.tensor([NAN, 2.0, 3.0]), truth) == pytest.approx(filled)
    assert auroc(torch.tensor([0.1, 0.5, NAN]), torch.tensor([False, False, True])) == 0.75  # equal to the least


def test_shares_of_clients_with_negative_values_are_zero_unless_all_are_negative() -> None:
    assert shares(torch.tensor([-5.0, 1.0, 3.0])).tolist() == [0, 0.25, 0.75]
    assert shares(torch.tensor([-5.0, -1.0])).tolist() == [0.5, 0.5]
    assert share_error(torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0])) == 1


def known() -> Known:
    """A federation whose truth is an additive game: clients have 0.5, 0.3 and 0.2 of it."""
    worth = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    utilities = (all_coalitions(3).double() @ worth).expand(2, 8)
    return {"small": (small_federation(), exact_truth((1, 2), utilities.contiguous()))}


def told(values: list[float], low: list[float], high: list[float]) -> BenchResults:
    """One run's values and the ends of their intervals."""
    results = BenchResults(None)
    ends = torch.tensor(low), torch.tensor(high)
    results.add("small", 0, Values({"m": torch.tensor(values)}, intervals={"m": ends}))
    return results


def test_interval_coverage_compares_shares_of_the_total_with_the_true_shares() -> None:
    values = [2.0, 1.0, 1.0]
    # Shares 0.5, 0.25, 0.25 of a total of 4; half widths 0.05 as shares. True: 0.5, 0.3, 0.2.
    for half, held in ((0.2001, 1), (0.19, 1 / 3)):
        ends = ([value + sign * half for value in values] for sign in (-1, 1))
        assert covered(told(values, *ends), known(), "m") == pytest.approx(held)
    assert covered(told([0.5, 0.3, 0.2], [0.4, NAN, 0.3], [0.6, NAN, 0.4]), known(), "m") == 0.5
    assert math.isnan(covered(told([1.0, 2.0, 3.0], [NAN] * 3, [NAN] * 3), known(), "m"))
    assert math.isnan(covered(told([-1.0, -1.0, 0.0], [-3.0, -3.0, -2.0], [1.0, 1.0, 2.0]), known(), "m"))
