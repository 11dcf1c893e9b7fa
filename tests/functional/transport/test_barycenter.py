"""The federated barycenter against POT's, with access to all samples."""

from __future__ import annotations

import numpy as np
import ot
import pytest
import torch
from torch import Tensor

from flsv.errors import ConfigurationError
from flsv.functional.transport import TransportClient, wasserstein_barycenter, wasserstein_distance


def three_gaussians() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    means = torch.tensor([[0.0, 0.0], [6.0, 0.0], [3.0, 5.0]], dtype=torch.float64)
    return [torch.randn(100, 2, generator=generator).double() + mean for mean in means]


def barycenter(samples: list[Tensor], iterations: int, support: int = 100, weights: Tensor | None = None) -> Tensor:
    clients = [TransportClient(x, allow_reconstruction=True) for x in samples]
    generator = torch.Generator().manual_seed(1)
    return wasserstein_barycenter(
        clients, support=support, iterations=iterations, weights=weights, generator=generator
    ).support_points


def objective(samples: list[Tensor], points: Tensor) -> float:
    return sum(float(wasserstein_distance(x, points)) ** 2 for x in samples) / len(samples)


@pytest.mark.slow
def test_distance_to_pots_shrinks_with_the_iterations() -> None:
    samples = three_gaussians()
    start = np.random.default_rng(0).normal(size=(100, 2)) + 3
    masses = [np.full(100, 0.01)] * 3
    reference = torch.from_numpy(ot.lp.free_support_barycenter([x.numpy() for x in samples], masses, start))
    found = {k: barycenter(samples, k) for k in (1, 3, 10, 20)}
    distances = [float(wasserstein_distance(points, reference)) for points in found.values()]
    assert distances[0] > distances[1] > distances[2] > distances[3]
    assert distances[3] < 0.3  # both are local solutions, of 100 points each
    assert objective(samples, found[20]) < 1.005 * objective(samples, reference)


def test_distances_are_those_to_the_barycenter() -> None:
    samples = three_gaussians()
    clients = [TransportClient(x, allow_reconstruction=True) for x in samples]
    found = wasserstein_barycenter(clients, support=100, iterations=25, generator=torch.Generator().manual_seed(1))
    expected = torch.stack([wasserstein_distance(x, found.support_points) for x in samples])
    torch.testing.assert_close(found.distances, expected, rtol=1e-2, atol=0)


def test_wrong_input_says_so() -> None:
    clients = [TransportClient(x) for x in three_gaussians()]
    with pytest.raises(ConfigurationError, match="clients is empty"):
        wasserstein_barycenter([], support=3, iterations=1)
    with pytest.raises(ConfigurationError, match="never separate"):
        wasserstein_barycenter(clients, support=3, iterations=1, initial=torch.zeros(3, 2))
    with pytest.raises(ConfigurationError, match="client 0 has 2 features and client 3 has 4"):
        wasserstein_barycenter([*clients, TransportClient(torch.zeros(2, 4))], support=3, iterations=1)
    with pytest.raises(ConfigurationError, match="weights: expected 3"):
        wasserstein_barycenter(clients, support=3, iterations=1, weights=torch.ones(2))
    with pytest.raises(ConfigurationError, match="iterations=0"):
        wasserstein_barycenter(clients, support=3, iterations=0)
