"""Aggregators' weights by hand: FedAvg, ShapFed-WA, AFedSV, FedSV, RFA."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from torch import nn
from toys import fit, toy_data

from flsv.aggregation import FedAvg, GeometricMedian, ShapFedWA, ShapleySoftmax, ShapleyWeighted
from flsv.errors import ConfigurationError
from flsv.functional import participant_weights
from flsv.loop import FederatedLoop
from flsv.metrics import DecayedShapley
from flsv.parameters import ParameterSpace
from flsv.round import Round
from flsv.sampling import BernoulliSampler


def make_round(ids: list[int], samples: list[int], **kwargs: Any) -> Round:
    space = ParameterSpace(nn.Linear(3, 2))
    updates = torch.randn(len(ids), 8, generator=torch.Generator().manual_seed(len(ids)))
    return Round(0, torch.tensor(ids), torch.tensor(samples), torch.zeros(8), updates, space, **kwargs)


def test_fedavg() -> None:
    round = make_round([0, 1, 2], [10, 30, 60])
    torch.testing.assert_close(FedAvg().weights(round, {}).float(), torch.tensor([0.1, 0.3, 0.6]))
    torch.testing.assert_close(FedAvg("uniform").weights(round, {}).float(), torch.full((3,), 1 / 3))
    vector, weights = FedAvg().aggregate(round, {})
    torch.testing.assert_close(vector, weights @ round.client_vectors)


def test_shapfed_weighs_the_cohort_by_its_share() -> None:
    cssv = torch.tensor([[0.9, 0.5], [-0.2, 0.1], [0.3, 0.3], [-1.0, -1.0]])
    weights = ShapFedWA("cssv").weights(make_round([0, 2], [1, 1]), {"cssv": cssv})
    torch.testing.assert_close(weights, participant_weights(cssv[[0, 2]].double())[1])


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
    assert repr(rule) == "ShapFedWA(weighting='samples')"


def test_shapley_weights_count_all_clients_and_divide_by_the_chance() -> None:
    ssv = torch.tensor([0.9, 0.3, 0.6, 0.2])
    chances = torch.tensor([1.0, 0.5, 0.8, 0.25])
    round = make_round([1, 3], [1, 1], chances=lambda: chances)
    weights = ShapleyWeighted("ssv").weights(round, {"ssv": ssv})
    torch.testing.assert_close(weights.float(), ssv[[1, 3]] / ssv.sum() / chances[[1, 3]])
    normalized = ShapleyWeighted("ssv", normalize=True).weights(round, {"ssv": ssv})
    torch.testing.assert_close(normalized, weights / weights.sum())


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
    with pytest.raises(RuntimeError, match="has no value before the first aggregation"):
        ShapleyWeighted("sv").weights(round, {})


def avg_sv_baseline(w: list[np.ndarray], shapley: np.ndarray, ori: np.ndarray) -> np.ndarray:
    """ShapleyFL's ``fedsv.py``: a softmax of the round's values, half of that average, half of the model before."""
    weight = np.exp(shapley) / np.exp(shapley).sum()
    average = w[0] * weight[0]
    for i in range(1, len(w)):
        average = average + w[i] * weight[i]
    return average / 2 + ori / 2


def test_fedsv_is_half_a_softmax_average_and_half_the_model_before() -> None:
    space = ParameterSpace(nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)))
    start, vectors = torch.randn(space.size), torch.randn(3, space.size)
    round = Round(0, torch.tensor([0, 2, 3]), torch.tensor([10, 20, 70]), start, vectors, space)
    values = torch.tensor([0.3, float("nan"), -0.1, 0.9])
    vector, weights = ShapleySoftmax("sv").aggregate(round, {"sv": values})
    expected = avg_sv_baseline(
        list(vectors.double().numpy()), values[[0, 2, 3]].double().numpy(), start.double().numpy()
    )
    cut = space.num_parameters
    np.testing.assert_allclose(vector[:cut].numpy(), expected[:cut], rtol=1e-5, atol=1e-6)
    share = values[[0, 2, 3]].softmax(0)
    torch.testing.assert_close(vector[cut:], share @ vectors[:, cut:])  # statistics are not drawn back
    assert weights.sum().item() == pytest.approx(0.5)
    whole = ShapleySoftmax("sv", step=1, temperature=0.1).weights(round, {"sv": values})
    torch.testing.assert_close(whole.float(), (10 * values[[0, 2, 3]]).softmax(0))


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


def test_the_median_does_not_look_at_buffers() -> None:
    space = ParameterSpace(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
    cut = space.num_parameters
    vectors = torch.randn(3, space.size, generator=torch.Generator().manual_seed(0))
    plain = Round(0, torch.arange(3), torch.ones(3), torch.zeros(space.size), vectors, space)
    other = vectors.clone()
    other[0, cut:] += 1000
    changed = Round(0, torch.arange(3), torch.ones(3), torch.zeros(space.size), other, space)
    assert torch.equal(GeometricMedian().weights(plain, {}), GeometricMedian().weights(changed, {}))


def test_identical_models_do_not_divide_by_zero() -> None:
    round = make_round([0, 1, 2], [1, 1, 2])
    round.client_vectors[:] = 1.0
    vector, weights = GeometricMedian().aggregate(round, {})
    assert torch.equal(vector, torch.ones(8))
    torch.testing.assert_close(weights, torch.tensor([0.25, 0.25, 0.5]))
