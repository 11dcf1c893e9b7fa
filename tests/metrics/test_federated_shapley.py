"""Coalition metrics: against permutations written out, absent clients, and inside a federation."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from functional.shapley.games import random_table, reference_shapley, table_game
from torch import Tensor
from toys import Plain, fit, toy_data

from flsv import ConfigurationError
from flsv.aggregation import FedAvg, ShapleyWeighted
from flsv.functional import gradient_shapley
from flsv.loop import FederatedLoop
from flsv.metrics import (
    CoalitionValue,
    ContributionMetric,
    CumulativeShapley,
    GradientShapley,
    LeaveOneOut,
    PartialFederatedShapley,
    SurrogateFederatedShapley,
)
from flsv.metrics.coalitions import SurrogateAverage
from flsv.sampling import FixedCohort, ShapleyImportanceSampler, SoftmaxSampler, UniformSampler


def test_cumulative_sums_the_rounds_and_their_variances() -> None:
    metric = CumulativeShapley(num_clients=4, estimator="permutation", estimator_args={"budget": 12})
    single = PartialFederatedShapley(num_clients=4, estimator="permutation", estimator_args={"budget": 12})
    total, variance = torch.zeros(3), torch.zeros(3)
    for seed in range(3):
        utility = table_game(random_table(3, seed))
        for each in (metric, single):
            each.update(torch.tensor([0, 1, 3]), utility, torch.Generator().manual_seed(seed))
        total += single.compute()[[0, 1, 3]]
        variance += single.diagnostics()["stderr"][[0, 1, 3]] ** 2
    torch.testing.assert_close(metric.compute()[[0, 1, 3]], total)
    torch.testing.assert_close(metric.diagnostics()["stderr"][[0, 1, 3]], variance.sqrt())
    assert metric.compute()[2].isnan()


def test_surrogate_is_equation_3() -> None:
    metric = SurrogateFederatedShapley(num_clients=4, beta=0.6, estimator="exact")
    value = torch.full((4,), 0.5, dtype=torch.float64)
    for ids, seed in (([0, 1, 2], 1), ([1, 3], 2), ([0, 1, 2], 3)):
        table = random_table(len(ids), seed)
        metric.update(torch.tensor(ids), table_game(table))
        sv = torch.from_numpy(reference_shapley(table))
        nsv = (sv - sv.min()) / (sv.max() - sv.min())
        value[ids] = 0.6 * value[ids] + 0.4 * nsv
        seen = value.where(metric.history[:, -1] > 0, torch.nan)
        torch.testing.assert_close(metric.compute().double(), seen, rtol=1e-5, atol=1e-6, equal_nan=True)
    assert not seen.isnan().any()


@pytest.mark.parametrize("normalize", ["min-max", "positive"])
def test_a_surrogates_error_is_that_of_the_value_in_units_of_the_range(normalize: Any) -> None:
    options = {"estimator": "permutation", "estimator_args": {"budget": 12}}
    plain = PartialFederatedShapley(4, **options)
    surrogate = CoalitionValue(4, fold=SurrogateAverage(normalize=normalize), **options)
    for each in (plain, surrogate):
        each.update(torch.arange(4), table_game(random_table(4)), torch.Generator().manual_seed(0))
    values, stderr = plain.compute(), plain.diagnostics()["stderr"]
    least = values.min() if normalize == "min-max" else 0
    torch.testing.assert_close(surrogate.diagnostics()["stderr"], stderr / (values.max() - least))


@pytest.mark.parametrize("value", ["shapley", "banzhaf", "beta"])
def test_auto_keeps_to_a_budget_for_few_players_too(value: Any) -> None:
    metric = CoalitionValue(8, value=value, estimator_args={"budget": 60})
    metric.update(torch.arange(8), lambda masks: masks.sum(1).double(), torch.Generator().manual_seed(0))
    assert 30 < metric.diagnostics()["evaluations"] <= 60
    exact = CoalitionValue(8, value=value, estimator_args={"budget": 2**8})
    exact.update(torch.arange(8), lambda masks: masks.sum(1).double() ** 2)
    assert exact.diagnostics()["stderr"].tolist() == [0.0] * 8


class Remember(FedAvg):
    """Keeps the rounds."""

    def __init__(self) -> None:
        super().__init__()
        self.rounds: list[Any] = []

    def weights(self, round: Any, contributions: Any) -> Tensor:
        self.rounds.append(round)
        return super().weights(round, contributions)


def validation_accuracy(module: Plain, space: Any, vector: Tensor, data: Any) -> float:
    before = space.read(module)
    space.write(module, vector)
    module.eval()
    hits = [(module(x).argmax(-1) == y).float() for x, y in data.val_dataloader()]
    space.write(module, before)
    return torch.cat(hits).mean().double()


def test_the_game_is_that_of_the_rounds_own_models(tmp_path: Path) -> None:
    remember, data = Remember(), toy_data((3, 2, 2, 1), batch_size=7, server_val=0.3)
    loop = FederatedLoop(
        remember,
        {
            "sv": PartialFederatedShapley(estimator="exact"),
            "loo": LeaveOneOut(),
            "classes": PartialFederatedShapley(estimator="exact", per_class=True),
        },
        sampler=UniformSampler(3),
        seed=4,
    )
    module = fit(loop, tmp_path, data=data, rounds=2)
    round = remember.rounds[-1]
    table = torch.empty(8, dtype=torch.float64)
    for number in range(8):
        members = [i for i in range(3) if number >> i & 1]
        model = round.client_vectors[members].mean(0) if members else round.global_vector
        table[number] = validation_accuracy(module, loop.space, model, data)
    ids, expected = round.client_ids, torch.from_numpy(reference_shapley(table))
    torch.testing.assert_close(loop.contributions["sv"][ids].double(), expected, rtol=1e-5, atol=1e-6)
    without = torch.stack([table[7] - table[7 - 2**i] for i in range(3)])
    torch.testing.assert_close(loop.contributions["loo"][ids].double(), without, rtol=1e-5, atol=1e-6)
    assert loop.contributions["classes"].by_class.shape == (4, 3)
    assert round.games is not None
    assert loop.metrics["loo"].diagnostics()["evaluations"] == 2 * 4


def test_gradient_shapley_is_that_of_the_validation_loss(tmp_path: Path) -> None:
    remember, data = Remember(), toy_data(server_val=0.3)
    metrics: dict[str, ContributionMetric] = {
        "first": GradientShapley(),
        "second": GradientShapley(order=2),
        "exact": PartialFederatedShapley(estimator="exact", performance="negative_loss"),
    }
    module = Plain(optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01))
    loop = FederatedLoop(remember, metrics, seed=1)
    fit(loop, tmp_path, module, data, rounds=1)
    round = remember.rounds[0]
    loop.space.write(module, round.global_vector)
    module.eval().zero_grad()
    x, y = (torch.cat(parts) for parts in zip(*data.val_dataloader()))
    torch.nn.functional.cross_entropy(module(x), y).backward()
    gradient = torch.cat([p.grad.reshape(-1) for p in module.parameters()])
    products = round.client_updates[:, : len(gradient)] @ gradient
    torch.testing.assert_close(loop.contributions["first"], gradient_shapley(products), rtol=1e-4, atol=1e-6)
    assert (loop.contributions["second"] - loop.contributions["first"]).abs().max() > 1e-6


def test_without_validation_data_or_forward_it_is_said_before_training(tmp_path: Path) -> None:
    loop = FederatedLoop(metrics={"sv": PartialFederatedShapley()})
    with pytest.raises(ConfigurationError, match=r"metrics \['sv'\] evaluate models on the server's validation set"):
        fit(loop, tmp_path, data=toy_data(server_val=0))


def s_fedavg(rounds: list[tuple[list[int], list[float]]], n: int) -> tuple[list[float], list[float]]:
    """ShapleyFL's ``s-fedavg.py``: relevance from 1/n, and the chances it gives."""
    relevance = [1 / n] * n
    for ids, values in rounds:
        for i, value in zip(ids, values):
            relevance[i] = relevance[i] * 0.75 + value * 0.25
    total = sum(math.exp(phi) for phi in relevance)
    return relevance, [math.exp(phi) / total for phi in relevance]


def test_s_fedavg_is_the_reference() -> None:
    n, rounds = 5, [([0, 2, 3], [0.3, -0.1, 0.05]), ([2, 3], [0.2, 0.4]), ([0, 3], [0.6, -0.2])]
    metric = PartialFederatedShapley(n, estimator="exact", momentum=0.75, init="uniform")
    for ids, values in rounds:
        worth = torch.tensor(values)
        metric.update(torch.tensor(ids), lambda masks, worth=worth: masks.float() @ worth)
    relevance, chances = s_fedavg(rounds, n)
    value = metric.compute()
    assert value[[1, 4]].isnan().all()  # never seen
    torch.testing.assert_close(value[[0, 2, 3]], torch.tensor(relevance)[[0, 2, 3]])
    assert metric.prior == 1 / n
    drawn = SoftmaxSampler(2, "sv").chances(n, {"sv": value.nan_to_num(metric.prior)})
    torch.testing.assert_close(drawn.float(), torch.tensor(chances))
    # Ours, the option: the average starts at the first value, and clients never seen are the mean of the others.
    ours = PartialFederatedShapley(n, estimator="exact", momentum=0.75)
    ours.update(torch.tensor([0, 2]), lambda masks: masks.float() @ torch.tensor([0.3, -0.1]))
    torch.testing.assert_close(ours.compute()[[0, 2]], torch.tensor([0.3, -0.1]))
    assert ours.prior is None


class Sees(ShapleyWeighted):
    def weights(self, round: Any, contributions: Any) -> Any:
        self.seen = contributions["ssv"]
        return super().weights(round, contributions)


class Draws(FixedCohort):
    def sample(self, num_clients: int, contributions: Any, generator: Any, round_index: int = 0) -> Any:
        self.coins = ShapleyImportanceSampler(2, "ssv").coins(num_clients, contributions)
        return super().sample(num_clients, contributions, generator, round_index)


def test_a_run_has_no_value_for_whoever_was_never_drawn(tmp_path: Path) -> None:
    aggregator, sampler = Sees("ssv"), Draws([0, 2])
    loop = FederatedLoop(aggregator, {"ssv": SurrogateFederatedShapley()}, sampler=sampler, seed=1)
    fit(loop, tmp_path, data=toy_data(), rounds=2)
    assert loop.contributions["ssv"][1].isnan()
    assert aggregator.seen[1] == 0.5
    assert sampler.coins.isfinite().all()
    rows = [line.split(",") for line in (tmp_path / "contributions.csv").read_text().splitlines()[1:]]
    assert {row[2] for row in rows} == {"0", "2"}
