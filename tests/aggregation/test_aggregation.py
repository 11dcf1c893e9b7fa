"""Aggregators' weights by hand where tests/replay does not lead: before anything is known, buffers, other options."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy.optimize import minimize
from torch import nn
from toys import fit, toy_data

from flsv.aggregation import FedAvg, FedYogi, GeometricMedian, ShapFedWA, ShapleySoftmax, ShapleyWeighted
from flsv.errors import ConfigurationError
from flsv.loop import FederatedLoop
from flsv.metrics import DecayedShapley
from flsv.parameters import ParameterSpace
from flsv.round import Round
from flsv.sampling import BernoulliSampler


def make_round(ids: list[int], samples: list[int], **kwargs: Any) -> Round:
    space = ParameterSpace(nn.Linear(3, 2))
    updates = torch.randn(len(ids), 8, generator=torch.Generator().manual_seed(len(ids)))
    return Round(0, torch.tensor(ids), torch.tensor(samples), torch.zeros(8), updates, space, **kwargs)


def test_shapfed_without_contributions_is_uniform() -> None:
    assert ShapFedWA().weights(make_round([0, 1, 2, 3], [1, 2, 3, 4]), {}).tolist() == [0.25] * 4
    nothing = torch.full((4, 2), float("nan"))
    assert ShapFedWA().weights(make_round([0, 1], [1, 2]), {"cssv": nothing}).tolist() == [0.5] * 2


def test_shapfed_counts_a_newcomer_as_the_mean_of_the_known() -> None:
    cssv = torch.tensor([[1.0], [float("nan")], [0.0]])  # gamma 1, unknown, 0.5
    weights = ShapFedWA().weights(make_round([0, 1, 2], [1, 1, 1]), {"cssv": cssv})
    torch.testing.assert_close(weights.float(), torch.tensor([1.0, 0.75, 0.5]) / 2.25)


def test_shapfed_by_samples() -> None:
    """n_i gamma_i; before anything is measured n_i, which is FedAvg."""
    cssv = torch.tensor([[0.9, 0.5], [-0.2, 0.1], [0.3, 0.3]])
    round, rule = make_round([0, 2], [30, 10]), ShapFedWA(weighting="samples")
    expected = torch.tensor([30 * (1.9 + 1.5) / 4, 10 * 1.3 / 2])
    torch.testing.assert_close(rule.weights(round, {"cssv": cssv}).float(), expected / expected.sum())
    assert rule.weights(round, {}).tolist() == FedAvg().weights(round, {}).tolist()


def test_horvitz_thompson_is_unbiased() -> None:
    """The mean over many cohorts of the aggregate is the aggregate over all clients (eq. 5)."""
    torch.manual_seed(0)
    ssv, updates = torch.tensor([0.9, 0.3, 0.6, 0.2, 0.5]), torch.randn(5, 8)
    sampler, generator = BernoulliSampler(2), torch.Generator().manual_seed(1)
    space = ParameterSpace(nn.Linear(3, 2))
    total, squares, draws = torch.zeros(8), torch.zeros(8), 3000
    for _ in range(draws):
        ids = sampler.sample(5, {}, generator)
        chances = partial(sampler.inclusion_probabilities, 5, {})
        round = Round(0, ids, torch.ones(len(ids)), torch.zeros(8), updates[ids], space, chances=chances)
        step, _ = ShapleyWeighted("ssv").aggregate(round, {"ssv": ssv})
        total, squares = total + step, squares + step**2
    mean = total / draws
    error = ((squares / draws - mean**2) / draws).sqrt()
    assert ((mean - ssv / ssv.sum() @ updates).abs() < 4.5 * error).all()


def test_shapley_weights_without_anything_positive_are_equal() -> None:
    round = make_round([0, 1], [1, 1])
    assert ShapleyWeighted("sv").weights(round, {"sv": torch.tensor([-1.0, -2.0])}).tolist() == [0.5, 0.5]
    normalized = ShapleyWeighted("sv", normalize=True).weights(round, {"sv": torch.tensor([0.6, 0.2, 0.9])})
    assert normalized.tolist() == pytest.approx([0.75, 0.25])
    with pytest.raises(RuntimeError, match="has no value before the first aggregation"):
        ShapleyWeighted("sv").weights(round, {})


def test_fedsv_is_half_a_softmax_average_and_half_the_model_before() -> None:
    """As in ShapleyFL's ``fedsv.py``; statistics are not drawn back."""
    space = ParameterSpace(nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)))
    start, vectors = torch.randn(space.size), torch.randn(3, space.size)
    round = Round(0, torch.tensor([0, 2, 3]), torch.tensor([10, 20, 70]), start, vectors, space)
    vector, weights = ShapleySoftmax("sv").aggregate(round, {"sv": torch.tensor([0.3, float("nan"), -0.1, 0.9])})
    powers = [math.exp(value) for value in (0.3, -0.1, 0.9)]
    average = sum(power / sum(powers) * row for power, row in zip(powers, vectors))
    cut = space.num_parameters
    torch.testing.assert_close(vector[:cut], (average / 2 + start / 2)[:cut])
    torch.testing.assert_close(vector[cut:], average[cut:])
    assert weights.sum().item() == pytest.approx(0.5)


def test_a_softmax_needs_what_is_known_before_aggregation(tmp_path: Path) -> None:
    loop = FederatedLoop(ShapleySoftmax("sv"), {"sv": DecayedShapley()})
    with pytest.raises(ConfigurationError, match="DecayedShapley is updated after aggregation"):
        fit(loop, tmp_path, data=toy_data(server_val=0.2))
    assert loop.round_index == 0


def test_geometric_median_against_scipy() -> None:
    round = make_round([0, 1, 2, 3], [10, 20, 30, 40])
    points, alpha = round.client_vectors.double().numpy(), [0.1, 0.2, 0.3, 0.4]

    def objective(z: Any) -> float:
        return sum(a * ((z - x) @ (z - x)) ** 0.5 for a, x in zip(alpha, points))

    best = minimize(objective, points.mean(0), method="BFGS")
    vector, weights = GeometricMedian(iterations=200, tolerance=1e-12).aggregate(round, {})
    assert objective(vector.double().numpy()) == pytest.approx(best.fun, rel=1e-5)
    assert weights.sum() == pytest.approx(1)


@pytest.mark.parametrize("aggregator", [GeometricMedian(), FedYogi()], ids=repr)
def test_buffers_are_averaged_and_not_looked_at(aggregator: Any) -> None:
    space = ParameterSpace(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
    cut, vectors = space.num_parameters, torch.randn(3, space.size)
    other = vectors.clone()
    other[0, cut:] += 1000
    plain, changed = (
        aggregator.aggregate(Round(0, torch.arange(3), torch.ones(3), torch.zeros(space.size), rows, space), {})
        for rows in (vectors, other)
    )
    assert torch.equal(plain[1], changed[1])
    assert torch.equal(plain[0][:cut], changed[0][:cut])
    torch.testing.assert_close(changed[0][cut:], changed[1] @ other[:, cut:])


def test_identical_models_do_not_divide_by_zero() -> None:
    round = make_round([0, 1, 2], [1, 1, 2])
    round.client_vectors[:] = 1.0
    vector, weights = GeometricMedian().aggregate(round, {})
    assert torch.equal(vector, torch.ones(8))
    torch.testing.assert_close(weights, torch.tensor([0.25, 0.25, 0.5]))
