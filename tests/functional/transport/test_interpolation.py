"""Interpolating measures: on the geodesic where they can be, near it elsewhere."""

from __future__ import annotations

import pytest
import torch
from functional.transport.test_statistics import labeled

from flsv.errors import ConfigurationError
from flsv.functional.transport import interpolating_measure, wasserstein_distance


@pytest.mark.parametrize("t", [0.25, 0.5])
def test_equal_sizes_lie_on_the_geodesic(t: float) -> None:
    (x, _), (x2, _) = labeled(0), labeled(1)
    whole, gamma = wasserstein_distance(x, x2), interpolating_measure(x, x2, t=t)
    torch.testing.assert_close(wasserstein_distance(x, gamma), t * whole)
    torch.testing.assert_close(wasserstein_distance(gamma, x2), (1 - t) * whole)


def test_barycentric_projection_moves_the_side_with_s_points() -> None:
    """Equation 6, with the plan written out: 4 points to 2, in order on the line."""
    x, x2 = torch.tensor([[3.0], [0.0], [2.0], [1.0]]), torch.tensor([[10.0], [20.0]])
    torch.testing.assert_close(interpolating_measure(x, x2, support=2), torch.tensor([[5.25], [11.25]]))
    moved = interpolating_measure(x, x2, support=4)
    torch.testing.assert_close(moved, torch.tensor([[11.5], [5.0], [11.0], [5.5]]))


@pytest.mark.parametrize("support", [10, 35])
def test_any_other_support_is_near_the_geodesic(support: int) -> None:
    (x, _), (x2, _) = labeled(0), labeled(1, m=25)
    x2 = x2 + 5
    generator = torch.Generator().manual_seed(0)
    gamma = interpolating_measure(x, x2, support=support, generator=generator)
    assert gamma.shape == (support, 3)
    excess = wasserstein_distance(x, gamma) + wasserstein_distance(gamma, x2) - wasserstein_distance(x, x2)
    assert 0 <= float(excess) < 0.1 * float(wasserstein_distance(x, x2))
    given = interpolating_measure(x, x2, support=support, initial=gamma)
    assert float(wasserstein_distance(given, gamma)) < 0.3


def test_wrong_settings_say_so() -> None:
    x, _ = labeled(0)
    with pytest.raises(ConfigurationError, match="t=1"):
        interpolating_measure(x, x, t=1)
    with pytest.raises(ConfigurationError, match="support=0"):
        interpolating_measure(x, x, support=0)
    with pytest.raises(ConfigurationError, match=r"initial: expected \[7, 3\]"):
        interpolating_measure(x, x, support=7, initial=x)
