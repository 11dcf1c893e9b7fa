"""Whoever never took part has no value, in any metric; what strategies believe of them is another matter."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from metric_rounds import judges
from toys import fit, toy_data

import flsv.metrics
from flsv.aggregation import ShapleyWeighted
from flsv.loop import FederatedLoop
from flsv.metrics import ContributionMetric, SurrogateFederatedShapley
from flsv.privacy import GaussianPrivacy
from flsv.sampling import FixedCohort, ShapleyImportanceSampler
from flsv.server.contribution_metrics import ContributionMetrics
from flsv.valuation import clients_of, server_of

N, M, COHORT = 4, 2, torch.tensor([0, 2])
VIEWS = torch.tensor([[1, torch.nan, 2, torch.nan]] * 2)
DASH = "\N{EN DASH}"


def play(metric: Any) -> None:
    metric.update(COHORT, lambda masks: masks.float() @ torch.tensor([1.0, 3.0]))


def heads(metric: Any) -> None:
    metric.update(COHORT, torch.randn(2, M, 3), torch.randn(M, 3))


def decayed(metric: Any) -> None:
    metric.update(COHORT, 0, lambda masks: masks.float() @ torch.tensor([1.0, 3.0]))


def whole_run(metric: Any) -> None:
    def game(start: Any, updates: Any, weights: Any) -> Any:
        return lambda masks: masks.float().sum(1)

    metric.update(COHORT, 0, torch.zeros(3), torch.ones(2, 3), torch.full((2,), 0.5), game)


def data(metric: Any) -> None:
    x, y = torch.randn(30, 4, generator=torch.Generator().manual_seed(0)), torch.zeros(10, dtype=torch.long)
    clients = clients_of([(x[:10], y), (x[:10], y), (x[10:20], y), (x[:10], y)])
    metric.update(COHORT, [clients[0], clients[2]], server_of(x[20:], y))


def judged(metric: Any) -> None:
    models = torch.tensor([[0.1, 0.4], [0.3, -0.2]])
    asked = (torch.full((2,), 0.5), models.mean(0), judges(COHORT, models))
    metric.update(COHORT, *([models] if metric.__class__.__name__ == "ContributionEstimation" else []), *asked)


FEDBARY: dict[str, Any] = {"num_clients": N, "features": "pixels", "support": 4, "iterations": 5}
CASES: dict[str, tuple[dict[str, Any], Callable[[Any], None]]] = {
    "CalibratedOTGradient": (FEDBARY, data),
    "ClassSpecificShapley": ({"num_clients": N, "num_classes": M}, heads),
    "CoalitionValue": ({"num_clients": N, "value": "banzhaf"}, play),
    "CommunicationCost": ({"num_clients": N}, lambda m: m.update(COHORT, torch.ones(2).long(), torch.ones(2).long())),
    "ContributionEstimation": ({"num_clients": N}, judged),
    "CosineGradientShapley": ({"num_clients": N}, lambda m: m.update(COHORT, torch.randn(2, 5))),
    "CumulativeShapley": ({"num_clients": N}, play),
    "DecayedShapley": ({"num_clients": N}, decayed),
    "DomainRelevance": ({"num_clients": N}, lambda m: m.update(COHORT, VIEWS)),
    "EverybodyElse": ({"num_clients": N}, judged),
    "GradientAgreement": (
        {"num_clients": N},
        lambda m: m.update(COHORT, -torch.ones(2), torch.randn(2, 5), torch.ones(2)),
    ),
    "GradientAgreementGame": (
        {"num_clients": N},
        lambda m: m.update(
            COHORT, -torch.ones(2), torch.randn(2, 5), torch.ones(2), 0, lambda masks: masks.sum(1).float()
        ),
    ),
    "GradientShapley": ({"num_clients": N}, lambda m: m.update(COHORT, torch.tensor([1.0, 2.0]))),
    "InRunShapley": (
        {"num_clients": N, "num_classes": M, "order": 2},
        lambda m: m.update(COHORT, torch.ones(2, M), torch.ones(2), torch.ones(2), torch.eye(2)),
    ),
    "LeaveOneOut": ({"num_clients": N}, play),
    "LowerBoundShapley": ({"num_clients": N}, play),
    "OneRoundShapley": ({"rounds": 1, "num_clients": N}, whole_run),
    "PartialFederatedShapley": ({"num_clients": N}, play),
    "PrivacyLoss": ({"privacy": GaussianPrivacy(1.0, 2.0), "num_clients": N}, lambda m: m.update(COHORT)),
    "SurrogateFederatedShapley": ({"num_clients": N}, play),
    "WassersteinContribution": (FEDBARY, data),
}
KINDS = {
    name
    for name in flsv.metrics.__all__
    if issubclass(getattr(flsv.metrics, name), ContributionMetric) and name != "ContributionMetric"
}


@pytest.mark.parametrize("name", sorted(KINDS))
def test_never_seen_is_nan(name: str) -> None:
    arguments, update = CASES[name]
    metric = getattr(flsv.metrics, name)(**arguments)
    update(metric)
    value = metric.compute().reshape(N, -1)
    assert value[[1, 3]].isnan().all(), value
    assert not value[[0, 2]].isnan().all(1).any(), value
    overall = metric.per_client(metric.compute())
    assert overall[[1, 3]].isnan().all()
    assert not overall[[0, 2]].isnan().any()


@pytest.mark.parametrize("init", [0.5, 0.2])
def test_strategies_see_the_prior(init: float) -> None:
    """AFedSV's clients start at a weight, which is no measurement."""
    metric = SurrogateFederatedShapley(num_clients=N, init=init)
    board = ContributionMetrics({"ssv": metric})
    play(metric)
    board.contributions["ssv"] = metric.compute()
    assert board.contributions["ssv"][[1, 3]].isnan().all()
    known = board.with_priors()["ssv"]
    assert known[[1, 3]].tolist() == pytest.approx([init] * 2)
    assert torch.equal(known[COHORT], metric.compute()[COHORT])


class Sees(ShapleyWeighted):
    def weights(self, round: Any, contributions: Any) -> Any:
        self.seen = contributions["ssv"]
        return super().weights(round, contributions)


class Draws(FixedCohort):
    def sample(self, num_clients: int, contributions: Any, generator: Any, round_index: int = 0) -> Any:
        self.coins = ShapleyImportanceSampler(2, "ssv").coins(num_clients, contributions)
        return super().sample(num_clients, contributions, generator, round_index)


def test_a_run_has_no_value_for_whoever_was_never_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    aggregator, sampler = Sees("ssv"), Draws([0, 2])
    loop = FederatedLoop(aggregator, {"ssv": SurrogateFederatedShapley()}, sampler=sampler, seed=1)
    fit(loop, tmp_path, data=toy_data(), rounds=2)
    assert loop.contributions["ssv"][1].isnan()
    assert aggregator.seen[1] == 0.5
    assert sampler.coins.isfinite().all()
    rows = [line.split(",") for line in (tmp_path / "contributions.csv").read_text().splitlines()[1:]]
    assert {row[2] for row in rows} == {"0", "2"}
    assert loop.participations.tolist() == [2, 0, 2]
    table = [line.split() for line in capsys.readouterr().out.splitlines()]
    header = next(line for line in table if line[:1] == ["client"])
    assert header[:4] == ["client", "samples", "rounds", "ssv"]
    assert next(line for line in table if line[:1] == ["1"])[2:] == ["0", DASH, DASH]
    assert next(line for line in table if line[:1] == ["2"])[2] == "2"
