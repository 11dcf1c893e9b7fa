"""Distances against NumPy, and where float32 gives up."""

import numpy as np
import pytest
import torch

from flsv.functional import divergences as module
from flsv.functional.divergences import distances, weighted_mean


@pytest.fixture(autouse=True, params=[1 << 20, 12])
def block(request, monkeypatch):
    monkeypatch.setattr(module, "CPU_BLOCK", request.param)


def test_against_numpy():
    torch.manual_seed(0)
    points, origin = torch.randn(5, 17), torch.randn(17)
    expected = np.linalg.norm(points.double().numpy() - origin.double().numpy(), axis=1)
    np.testing.assert_allclose(distances(points, origin), expected, rtol=1e-14)
    own = torch.randn(5, 17)
    expected = np.linalg.norm(points.double().numpy() - own.double().numpy(), axis=1)
    np.testing.assert_allclose(distances(points, own), expected, rtol=1e-14)
    weights = torch.rand(5)
    expected = weights.double().numpy() @ points.double().numpy()
    np.testing.assert_allclose(weighted_mean(points, weights), expected, rtol=1e-13)


@pytest.mark.parametrize(("dtype", "size"), [(torch.float32, 3e38), (torch.float64, 1e300), (torch.float32, 1e-40)])
def test_neither_overflow_nor_underflow(dtype, size):
    points = torch.full((2, 17), size, dtype=dtype)
    points[1] = 0
    found = distances(points, -points)
    assert found[0].item() == pytest.approx(2 * points[0, 0].item() * 17**0.5, rel=1e-9)
    assert found[1] == 0


def test_nan_stays_with_its_point():
    points = torch.ones(3, 17)
    points[1, 13] = torch.nan
    assert distances(points, torch.zeros(17)).isnan().tolist() == [False, True, False]
