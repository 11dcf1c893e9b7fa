"""Variances over rounds against NumPy, by blocks and by steps, and the intervals made of them."""

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from flsv import Reporting
from flsv.aggregation import ShapFedWA
from flsv.federation import FederatedLoop
from flsv.functional.confidence import half_width
from flsv.metrics import (
    ClassSpecificShapley,
    ContributionMetric,
    CosineGradientShapley,
    CumulativeShapley,
    DecayedShapley,
    LeaveOneOut,
    PartialFederatedShapley,
)
from flsv.metrics.intervals import WIDTH, spread_add, spread_merge, spread_variance, step_variance
from flsv.report import open_run
from helpers.data import toy_data
from helpers.fits import fit
from helpers.metric_cases import METRIC_CASES


def folded(values: torch.Tensor) -> torch.Tensor:
    """Of ``[T, n]``, NaN for clients outside the cohort."""
    rows = torch.zeros(values.shape[1], WIDTH, dtype=values.dtype)
    for value in values:
        ids = (~value.isnan()).nonzero().flatten()
        rows = spread_add(rows, ids, value[ids])
    return rows


def blocks_of(count: int) -> list[range]:
    found, begin = [], 0
    while begin < count:
        length = int((len(found) + 1) ** 0.5)
        found.append(range(begin, min(begin + length, count)))
        begin += length
    return found


def made(rounds: int) -> torch.Tensor:
    return torch.randn(rounds, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64) + 7


@pytest.mark.parametrize("rounds", [2, 4, 30])
def test_spread_variance_is_the_mean_square_of_block_deviations(rounds: int) -> None:
    values = made(rounds)
    variance, count = spread_variance(folded(values))
    blocks = blocks_of(rounds)
    mean = values.mean(0)
    sums = torch.stack([(values[list(block)] - mean).sum(0) for block in blocks])
    expected = sums.square().sum(0) / rounds * len(blocks) / (len(blocks) - 1)
    torch.testing.assert_close(variance, expected)
    assert count.tolist() == [len(blocks)] * 3


def test_spread_variance_of_one_round_is_nan_and_of_equal_values_0() -> None:
    assert spread_variance(folded(made(1)))[0].isnan().all()
    rows = folded(torch.full((9, 1), 0.1, dtype=torch.float32))
    assert spread_variance(rows)[0].item() == 0
    assert half_width(torch.ones(2), torch.tensor([0.0, torch.nan]), 0.9).isnan().all()


@pytest.mark.parametrize("rounds", [2, 3, 10])
def test_step_variance_is_half_the_mean_square_of_successive_differences(rounds: int) -> None:
    values = made(rounds)
    variance, freedom = step_variance(folded(values))
    torch.testing.assert_close(variance, values.diff(dim=0).square().mean(0) / 2)
    differences = np.diff(np.eye(rounds), axis=0)
    form = differences.T @ differences  # a quadratic form's degrees of freedom are tr^2 / tr of the square
    assert freedom[0].item() == pytest.approx(np.trace(form) ** 2 / np.trace(form @ form))
    assert step_variance(folded(made(1)))[0].isnan().all()


def test_step_variance_of_an_absent_client_uses_its_own_rounds_and_merges_exactly() -> None:
    values = made(8)
    values[2:5, 1] = torch.nan
    values[:, 2] = torch.nan
    own = values[~values[:, 1].isnan(), 1]
    variance, _ = step_variance(folded(values))
    torch.testing.assert_close(variance[1], own.diff().square().mean() / 2)
    for cut in range(9):
        both = spread_merge(torch.stack([folded(values[:cut]), folded(values[cut:])]))
        torch.testing.assert_close(step_variance(both)[0], variance, equal_nan=True)
        assert torch.equal(both[:, 10], folded(values)[:, 10])


def test_merged_statistics_of_single_rounds_equal_one_pass_over_all_rounds() -> None:
    values = made(12)
    values[3:6, 1] = torch.nan  # absent
    values[:, 2] = torch.nan
    one_by_one = folded(values[:1])
    for index in range(1, 12):
        one_by_one = spread_merge(torch.stack([one_by_one, folded(values[index : index + 1])]))
    torch.testing.assert_close(one_by_one, folded(values))
    both = spread_merge(torch.stack([folded(values[:5]), folded(values[5:])]))
    cuts = [blocks_of(5), blocks_of(7)]
    mean = values[:, 0].mean()
    sums = [(part[list(b), 0] - mean).sum() for part, bs in zip((values[:5], values[5:]), cuts) for b in bs]
    count = len(sums)
    expected = torch.stack(sums).square().sum() / 12 * count / (count - 1)
    torch.testing.assert_close(spread_variance(both)[0][0], expected)
    assert both[0, 1] == values[0, 0]
    assert torch.equal(both[2], torch.zeros(WIDTH, dtype=torch.float64))
    idle = torch.zeros(3, WIDTH, dtype=torch.float64)
    for stretches in ([idle, folded(values)], [folded(values), idle]):
        assert torch.equal(spread_merge(torch.stack(stretches)), folded(values))


WITH = [name for name, case in METRIC_CASES.items() if getattr(case.part, "over_rounds", None) is not None]


def played(metric: ContributionMetric, worths: torch.Tensor, **more: int) -> ContributionMetric:
    for index, worth in enumerate(worths):
        also = {"round_index": index} if isinstance(metric, DecayedShapley) else {}
        metric.update(client_ids=torch.arange(len(worth)), utility=lambda m, w=worth: m.float() @ w, **also)
    return metric


def worths(rounds: int) -> torch.Tensor:
    return 2 + torch.randn(rounds, 3, generator=torch.Generator().manual_seed(0))


class Mean(CumulativeShapley):
    over_rounds = "mean"

    def compute(self) -> torch.Tensor:
        return super().compute() / self.seen


def by_steps(given: torch.Tensor, level: float) -> torch.Tensor:
    """Half the interval of one of three rounds, from their two differences, which have 2 * 2^2 / (3 * 2 - 1) degrees of
    freedom."""
    return stats.t.ppf((1 + level) / 2, 1.6) * (given.double().diff(dim=0).square().mean(0) / 2).sqrt()


def by_all(given: torch.Tensor, level: float) -> torch.Tensor:
    """As Student's, of rounds that have one mean."""
    return stats.t.ppf((1 + level) / 2, 2) * given.double().std(0)


@pytest.mark.parametrize(
    ("metric", "of_one", "factors"),
    [
        (CumulativeShapley(3), by_steps, [1, 1, 1]),
        (DecayedShapley(3, decay=0.5, normalize=False), by_steps, [0.5, 0.25, 0.125]),
        (PartialFederatedShapley(3, momentum=0.5), by_all, [0.25, 0.25, 0.5]),
        (PartialFederatedShapley(3, momentum=0.5, init=0.0), by_all, [0.125, 0.25, 0.5]),
        (LeaveOneOut(3), by_all, [0, 0, 1]),
        (Mean(3), by_all, [1 / 3, 1 / 3, 1 / 3]),
    ],
    ids=["sum", "decay", "momentum", "start value", "last round", "mean"],
)
def test_interval_of_a_weighted_sum_scales_with_its_factors(
    metric: ContributionMetric, of_one: Any, factors: list[float]
) -> None:
    level, given = 0.8, worths(3)
    low, high = played(metric, given).intervals(level)
    half = of_one(given, level) * sum(f * f for f in factors) ** 0.5
    torch.testing.assert_close((high - low).double() / 2, half, rtol=1e-4, atol=1e-4)
    value = (torch.tensor(factors).double()[:, None] * given).sum(0)
    torch.testing.assert_close((high + low).double() / 2, value, rtol=1e-4, atol=1e-4)


def test_cosine_reputation_is_a_weighted_sum_of_the_rounds_shares() -> None:
    metric = CosineGradientShapley(3, alpha=0.5)
    phis = []
    for seed in range(4):
        updates = torch.randn(3, 5, generator=torch.Generator().manual_seed(seed)).abs()
        metric.update(torch.arange(3), updates, torch.tensor([1, 2, 3]))
        phis.append(metric.phi.double())
    shares = torch.stack([phi / phi.sum() for phi in phis])
    value, factors = shares[0], [1.0]
    for phi, share in zip(phis[1:], shares[1:]):
        new = 0.5 * phi.sum() / (0.5 * phi.sum() + 0.5)
        value, factors = (1 - new) * value + new * share, [*(f * float(1 - new) for f in factors), float(new)]
    torch.testing.assert_close(metric.compute().double(), value, rtol=1e-5, atol=1e-6)  # so it is a weighted sum
    assert float(metric.round_spread[0, 9]) == pytest.approx(sum(f * f for f in factors), rel=1e-5)


def test_interval_by_the_estimators_error_exists_after_one_round() -> None:
    def noisy(masks: torch.Tensor) -> torch.Tensor:
        return (masks.float() @ torch.arange(1.0, 9.0)) ** 3 / 1000

    metric = CumulativeShapley(8, estimator="permutation", estimator_args={"num_permutations": 6})
    metric.update(torch.arange(8), noisy, torch.Generator().manual_seed(0))
    error = metric.diagnostics()["stderr"]
    assert (error > 0).any()
    low, high = metric.intervals()
    three_pairs = stats.t.ppf(0.95, 2)
    torch.testing.assert_close((high - low)[error > 0] / 2, three_pairs * error[error > 0], rtol=1e-3, atol=1e-3)
    metric.update(torch.arange(8), noisy, torch.Generator().manual_seed(1))
    first, both = error**2, metric.diagnostics()["stderr"] ** 2
    satterthwaite = both**2 / ((first**2 + (both - first) ** 2) / 2)
    torch.testing.assert_close(metric.error_freedom(), satterthwaite, rtol=1e-3, atol=0)
    exact = played(CumulativeShapley(3), worths(1))
    assert exact.diagnostics()["stderr"].tolist() == [0, 0, 0]
    assert exact.intervals()[0].isnan().all()  # an exact round says nothing of the next


@pytest.mark.parametrize("name", WITH)
def test_every_metric_records_each_rounds_values_for_intervals(name: str) -> None:
    metric = METRIC_CASES[name].fed()
    assert metric.round_spread[:, 0].max() > 1
    low, high = metric.intervals()
    value = metric.per_client(metric.compute())
    known = ~low.isnan()
    assert known.any()
    assert (low[known] <= value[known] + 1e-6).all()
    assert (value[known] <= high[known] + 1e-6).all()
    assert low[value.isnan()].isnan().all()


def test_intervals_are_in_a_runs_files_and_report(tmp_path: Path) -> None:
    metrics = {"cssv": ClassSpecificShapley(), "sv": CumulativeShapley(), "loo": LeaveOneOut()}
    federation = FederatedLoop(ShapFedWA("cssv"), metrics, seed=1, reporting=Reporting(figures=0))
    fit(federation, tmp_path, data=toy_data(), rounds=4)
    last = {}
    for row in csv.DictReader((tmp_path / "contributions.csv").read_text().splitlines()):
        if row["metric"] in federation.metrics and not row["class"]:
            last[row["metric"], int(row["client"])] = (row["low"], row["high"])
        else:
            assert row["low"] == row["high"] == ""
    run = open_run(tmp_path)
    for name, metric in federation.metrics.items():
        low, high = metric.intervals()
        for i in range(len(low)):
            assert tuple(map(float, last[name, i])) == (low[i].item(), high[i].item())
        assert run.ends(name)[0] == low.double().tolist()
        assert "spread over its rounds" in run.kind(name)
    frame = federation.to_frame()
    of_sv = frame[(frame["metric"] == "sv") & frame["class"].isna()]
    assert of_sv["low"].tolist() == federation.metrics["sv"].intervals()[0].double().tolist()
