"""The barycenter against POT."""

import numpy as np
import ot
import pytest
import torch
from torch import Tensor

from flsv.functional import (
    FederatedBarycenter,
    TransportClient,
    wasserstein_barycenter,
    wasserstein_distance,
)


def three_gaussians() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    means = torch.tensor([[0.0, 0.0], [6.0, 0.0], [3.0, 5.0]], dtype=torch.float64)
    return [torch.randn(100, 2, generator=generator).double() + mean for mean in means]


def barycenter(samples: list[Tensor], iterations: int) -> FederatedBarycenter:
    clients = [TransportClient(x, allow_reconstruction=True) for x in samples]
    generator = torch.Generator().manual_seed(1)
    return wasserstein_barycenter(clients, support=100, iterations=iterations, generator=generator)


def objective(samples: list[Tensor], points: Tensor) -> float:
    return sum(float(wasserstein_distance(x, points)) ** 2 for x in samples) / len(samples)


@pytest.mark.slow
def test_barycenter_approaches_pots_barycenter_with_the_iterations() -> None:
    samples = three_gaussians()
    start = np.random.default_rng(0).normal(size=(100, 2)) + 3
    masses = [np.full(100, 0.01)] * 3
    reference = torch.from_numpy(ot.lp.free_support_barycenter([x.numpy() for x in samples], masses, start))
    found = [barycenter(samples, k).support_points for k in (1, 3, 10, 20)]
    distances = [float(wasserstein_distance(points, reference)) for points in found]
    assert distances[0] > distances[1] > distances[2] > distances[3]
    assert distances[3] < 0.3  # both are local solutions, of 100 points each
    assert objective(samples, found[3]) < 1.005 * objective(samples, reference)


def test_reported_distances_are_the_wasserstein_distances_to_the_barycenter() -> None:
    found = barycenter(three_gaussians(), 25)
    expected = torch.stack([wasserstein_distance(x, found.support_points) for x in three_gaussians()])
    torch.testing.assert_close(found.distances, expected, rtol=1e-2, atol=0)
