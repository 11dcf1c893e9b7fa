"""Intervals of the metrics: what they are of, where there are none, in a run and in its files."""

import csv
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy import stats

from flsv import Reporting
from flsv.aggregation import ShapFedWA
from flsv.federation import FederatedLoop
from flsv.metrics import (
    ClassSpecificShapley,
    ContributionMetric,
    CosineGradientShapley,
    CumulativeShapley,
    DecayedShapley,
    LeaveOneOut,
    PartialFederatedShapley,
)
from flsv.report import open_run
from helpers.data import toy_data
from helpers.fits import fit
from helpers.metric_cases import METRIC_CASES

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
