"""The protocol against the exact distance, and what its roles see."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from flsv.errors import ConfigurationError
from flsv.functional.transport import (
    FederatedDistance,
    TransportClient,
    TransportServer,
    federated_wasserstein,
    wasserstein_distance,
)


def gaussians(dim: int, m: int = 150, m2: int = 150, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(dim)
    x, x2 = torch.randn(m, dim, generator=generator), 0.5 * torch.randn(m2, dim, generator=generator) + 1
    return x.to(dtype), x2.to(dtype)


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def exactly(x: Tensor, x2: Tensor, **options: Any) -> FederatedDistance:
    """The protocol with one point for every sample, which is exact and gives the samples away."""
    return federated_wasserstein(x, x2, support=len(x), generator=seeded(), allow_reconstruction=True, **options)


@pytest.mark.parametrize("dim", [1, 2, 10, 50])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_s_of_m_is_exact_after_20_iterations(dim: int, dtype: torch.dtype) -> None:
    x, x2 = gaussians(dim, dtype=dtype)
    result = exactly(x + 7, x2 + 7, iterations=20)
    exact = wasserstein_distance(x, x2)
    torch.testing.assert_close(result.distance, exact, rtol=1e-3, atol=0)
    assert result.distance >= exact * (1 - 1e-5)


@pytest.mark.parametrize("support", [1, 10, 40])
@pytest.mark.parametrize("p", [1, 2])
def test_fewer_points_stay_above(support: int, p: int) -> None:
    x, x2 = gaussians(5, m=100, m2=80)
    result = federated_wasserstein(x, x2, support=support, iterations=8, p=p, generator=seeded())
    assert result.gamma.shape == (support, 5)
    assert (result.history > wasserstein_distance(x, x2, p=p)).all()


def test_gamma_ends_where_t_says() -> None:
    x, x2 = gaussians(3)
    result = exactly(x, x2, iterations=25, t=0.75)
    torch.testing.assert_close(
        wasserstein_distance(x, result.gamma), 0.9 * wasserstein_distance(x, x2), rtol=1e-3, atol=0
    )


def test_a_run_is_reproducible_and_the_roles_exchange_points_and_numbers() -> None:
    x, x2 = gaussians(4, m=60, m2=50)
    client, server = TransportClient(x), TransportServer(x2)
    gamma = server.start(20, client.dim, seeded())
    for _ in range(3):
        eta, distance = client.answer(gamma)
        assert eta.shape == (20, 4)
        assert distance.shape == ()
        torch.testing.assert_close(distance, wasserstein_distance(x, gamma))
        before, gamma = gamma, server.step(eta, distance)
        torch.testing.assert_close(server.distance, distance + wasserstein_distance(before, x2))
    wired = federated_wasserstein(x, x2, support=20, iterations=3, generator=seeded())
    assert torch.equal(wired.gamma, gamma)
    assert torch.equal(wired.distance, server.distance)
    assert server.eta is not None
    assert torch.equal(wired.eta, server.eta)


def test_wrong_input_says_so() -> None:
    x, x2 = gaussians(3)
    with pytest.raises(ConfigurationError, match="have 2 features and the server's have 3"):
        federated_wasserstein(x[:, :2], x2, support=4, iterations=1)
    with pytest.raises(ConfigurationError, match="iterations=0"):
        federated_wasserstein(x, x2, support=4, iterations=0)
    with pytest.raises(ConfigurationError, match="support=0"):
        TransportServer(x2).start(0)
    with pytest.raises(ConfigurationError, match=r"start\(\) first"):
        TransportServer(x2).step(x, torch.tensor(1.0))
    with pytest.raises(ConfigurationError, match="1 of 150 rows"):
        TransportClient(x.index_fill(0, torch.tensor(3), torch.nan))
    with pytest.raises(ConfigurationError, match="samples has 3 features and gamma has 2"):
        TransportClient(x).answer(x2[:, :2])
