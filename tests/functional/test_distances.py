"""Distances against NumPy, far from 1 and far from the origin."""

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose

from flsv.functional import distances as module
from flsv.functional.distances import distances, squared_distances, weighted_mean
from helpers import make_generator


@pytest.mark.parametrize("block", [1 << 20, 12])
def test_update_distances_and_weighted_means_equal_those_of_numpy(monkeypatch, block):
    monkeypatch.setattr(module, "CPU_BLOCK_SIZE", block)
    torch.manual_seed(0)
    points = torch.randn(5, 17)
    weights = torch.rand(5)
    one_origin = torch.randn(17)
    origins = torch.randn(5, 17)

    for origin in (one_origin, origins):
        differences = (points.double() - origin.double()).numpy()
        expected = np.linalg.norm(differences, axis=1)
        assert_allclose(distances(points, origin), expected, rtol=1e-14)

    expected_mean = weights.double().numpy() @ points.double().numpy()
    assert_allclose(
        weighted_mean(points, weights),
        expected_mean,
        rtol=1e-13,
    )


@pytest.mark.parametrize(
    ("dtype", "size"),
    [
        (torch.float32, 3e38),
        (torch.float64, 1e300),
        (torch.float32, 1e-40),
    ],
)
def test_distances_of_extreme_sizes_neither_overflow_nor_underflow(dtype, size):
    points = torch.full((2, 17), size, dtype=dtype)
    points[1] = 0

    distance, distance_of_zeros = distances(points, -points)

    expected = 2 * points[0, 0].item() * 17**0.5
    assert distance.item() == pytest.approx(expected, rel=1e-9)
    assert distance_of_zeros == 0


def test_squared_distance_of_equal_rows_far_from_the_origin_is_0():
    x = torch.randn(50, 20, generator=make_generator()) + 1e4
    distances = squared_distances(x, x)
    assert torch.equal(
        distances.diagonal(),
        torch.zeros(50, dtype=torch.float64),
    )
    expected = (x.double()[:, None] - x.double()[None]).square().sum(-1)
    torch.testing.assert_close(distances, expected, rtol=1e-9, atol=0)
