"""Costs, distances and the protocol against NumPy, POT, SciPy and closed forms."""

import numpy as np
import ot
import pytest
import scipy.linalg
import torch
from torch import Tensor

from flsv.functional import (
    FederatedBarycenter,
    TransportClient,
    TransportServer,
    class_statistics,
    contribution_shares,
    federated_wasserstein,
    interpolating_measure,
    label_augmented_cost,
    label_distance,
    label_embedding,
    wasserstein_barycenter,
    wasserstein_distance,
)
from flsv.functional.distances import squared_distances
from flsv.functional.transport import cost
from flsv.functional.transport.checks import check_support, safe_support
from flsv.utilities.errors import ConfigurationError


def labeled(seed: int, m: int = 40, d: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(m, d, generator=generator, dtype=torch.float64)
    y = torch.tensor([0, 2, 5])[torch.randint(3, (m,), generator=generator)]
    return x + y[:, None], y


def test_statistics_are_numpys_per_class() -> None:
    x, y = labeled(0)
    diagonal, full = class_statistics(x, y), class_statistics(x, y, covariance="full")
    assert diagonal.labels.tolist() == [0, 2, 5]
    assert diagonal.deviations is not None
    assert full.deviations is not None
    for row, label in enumerate([0, 2, 5]):
        rows = x[y == label].numpy()
        assert diagonal.counts[row] == len(rows)
        np.testing.assert_allclose(diagonal.means[row], rows.mean(0))
        np.testing.assert_allclose(diagonal.deviations[row], rows.std(0))
        root = scipy.linalg.sqrtm(np.cov(rows.T, bias=True))
        np.testing.assert_allclose(full.deviations[row], root, atol=1e-9)


def test_wrong_covariances_and_labels_say_so() -> None:
    x, y = labeled(4)
    with pytest.raises(ConfigurationError, match="different covariances"):
        label_distance(class_statistics(x, y), class_statistics(x, y, covariance="none"))
    with pytest.raises(ConfigurationError, match=r"classes \[1\] are not in the statistics"):
        class_statistics(x, y).index(torch.tensor([0, 1]))
    with pytest.raises(ConfigurationError, match='covariance="diag"'):
        label_embedding(torch.zeros(2, 65), torch.tensor([0, 1]), covariance="full")


def test_equal_rows_are_at_0_far_from_the_origin() -> None:
    x = torch.randn(50, 20, generator=torch.Generator().manual_seed(0)) + 1e4
    distances = squared_distances(x, x)
    assert torch.equal(distances.diagonal(), torch.zeros(50, dtype=torch.float64))
    expected = (x.double()[:, None] - x.double()[None]).square().sum(-1)
    torch.testing.assert_close(distances, expected, rtol=1e-9, atol=0)


def stacked(x: Tensor, y: Tensor, covariance: str, weight: float) -> np.ndarray:
    """Section 4.1: [x; m_y; vec(Sigma^(1/2))], sample by sample."""
    rows = []
    for sample, label in zip(x.numpy(), y.numpy()):
        members = x.numpy()[y.numpy() == label]
        parts = [sample, weight**0.5 * members.mean(0)]
        if covariance == "diag":
            parts.append(weight**0.5 * members.std(0))
        if covariance == "full":
            values, vectors = np.linalg.eigh(np.cov(members.T, bias=True))
            parts.append(weight**0.5 * ((vectors * np.sqrt(values.clip(0))) @ vectors.T).ravel())
        rows.append(np.concatenate(parts))
    return np.stack(rows)


@pytest.mark.parametrize("covariance", ["diag", "full", "none"])
@pytest.mark.parametrize("rows", [100, 1, 7])
def test_cost_and_embedding_are_the_stacked_vectors(
    covariance: str, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cost, "CHUNK_BYTES", 16 * 25 * rows)
    (x, y), (x2, y2) = labeled(0), labeled(1, m=25)
    left, right = stacked(x, y, covariance, 3.0), stacked(x2, y2, covariance, 3.0)
    expected = ((left[:, None] - right[None]) ** 2).sum(-1)
    found = label_augmented_cost(x, y, x2, y2, covariance=covariance, label_weight=3.0)
    np.testing.assert_allclose(found, expected, rtol=1e-9)
    np.testing.assert_allclose(label_embedding(x, y, covariance=covariance, label_weight=3.0), left, atol=1e-9)


def test_an_unlabeled_side_leaves_the_features() -> None:
    (x, y), (x2, y2) = labeled(0), labeled(1)
    expected = torch.cdist(x, x2) ** 2
    for labels, labels2 in [(None, y2), (y, None), (None, None)]:
        torch.testing.assert_close(label_augmented_cost(x, labels, x2, labels2), expected)
    torch.testing.assert_close(label_augmented_cost(x, y, x2, y2, label_weight=0.0), expected)


def test_samples_and_labels_that_are_wrong_are_named() -> None:
    (x, y), (x2, y2) = labeled(0), labeled(1)
    broken = x.clone()
    broken[[1, 4], 0] = torch.tensor([torch.nan, torch.inf], dtype=torch.float64)
    for sides, message in (
        ((broken, y, x2, y2), "2 of 40 rows"),
        ((x, y, x2[:, :2], y2), "3 features and x2 has 2"),
        ((x, y, x2[:0], y2[:0]), "x2 is empty"),
        ((x, y[:5], x2, y2), "40 integer classes"),
        ((x.long(), y, x2, y2), "Flatten"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            label_augmented_cost(*sides)


@pytest.mark.parametrize("p", [1, 2])
def test_distance_is_pots(p: int) -> None:
    (x, y), (x2, y2) = labeled(0), labeled(1, m=25)
    squared = label_augmented_cost(x, y, x2, y2, label_weight=2.0).numpy()
    expected = ot.emd2([], [], squared ** (p / 2)) ** (1 / p)
    found = wasserstein_distance(x, x2, y=y, y2=y2, p=p, label_weight=2.0)
    assert float(found) == pytest.approx(expected, rel=1e-9)
    assert wasserstein_distance(x, x.flip(0), y=y, y2=y.flip(0), p=p) == 0


def test_shares_are_inverse_distances() -> None:
    distances = torch.tensor([1.0, 2.0, 4.0])
    torch.testing.assert_close(contribution_shares(distances), torch.tensor([4.0, 2.0, 1.0]) / 7)
    shares = contribution_shares(torch.tensor([torch.nan, 0.0, 3.0, 0.0]))
    torch.testing.assert_close(shares, torch.tensor([torch.nan, 0.5, 0, 0.5]), equal_nan=True)
    assert contribution_shares(torch.tensor([2.0, torch.inf])).tolist() == [1.0, 0.0]
    assert contribution_shares(torch.tensor([1e-300, 1e-300], dtype=torch.float64)).tolist() == [0.5, 0.5]
    assert contribution_shares(torch.tensor([torch.nan, torch.nan])).isnan().all()
    with pytest.raises(ConfigurationError, match="at least 0"):
        contribution_shares(torch.tensor([-1.0, 1.0]))


@pytest.mark.parametrize(("samples", "safe"), [(0, 0), (2, 0), (3, 1), (4, 1), (11, 5)])
def test_the_safe_support_is_the_largest_that_is_not_refused(samples: int, safe: int) -> None:
    check_support(safe, samples)
    with pytest.raises(ConfigurationError, match=f"support={safe + 1}: client 3 has {samples} samples"):
        check_support(safe + 1, samples, "client 3")


def test_equal_sizes_lie_on_the_geodesic() -> None:
    t, (x, _), (x2, _) = 0.25, labeled(0), labeled(1)
    whole, gamma = wasserstein_distance(x, x2), interpolating_measure(x, x2, t=t)
    torch.testing.assert_close(wasserstein_distance(x, gamma), t * whole)
    torch.testing.assert_close(wasserstein_distance(gamma, x2), (1 - t) * whole)


def test_barycentric_projection_moves_the_side_with_s_points() -> None:
    """Equation 6, with the plan written out: 4 points to 2, in order on the line."""
    x, x2 = torch.tensor([[3.0], [0.0], [2.0], [1.0]]), torch.tensor([[10.0], [20.0]])
    answered, _ = TransportClient(x, allow_reconstruction=True).answer(x2)
    torch.testing.assert_close(answered, torch.tensor([[5.25], [11.25]]))
    moved = interpolating_measure(x, x2)
    torch.testing.assert_close(moved, torch.tensor([[11.5], [5.0], [11.0], [5.5]]))


def gaussians(dim: int, m: int = 150, m2: int = 150) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(dim)
    x, x2 = torch.randn(m, dim, generator=generator), 0.5 * torch.randn(m2, dim, generator=generator) + 1
    return x.double(), x2.double()


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(0)


@pytest.mark.parametrize("dim", [1, 50])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_s_of_m_is_exact_after_20_iterations(dim: int, dtype: torch.dtype) -> None:
    x, x2 = (each.to(dtype) + 7 for each in gaussians(dim))
    result = federated_wasserstein(x, x2, support=150, iterations=20, generator=seeded(), allow_reconstruction=True)
    exact = wasserstein_distance(x, x2)
    torch.testing.assert_close(result.distance, exact, rtol=1e-3, atol=0)
    assert result.distance >= exact * (1 - 1e-5)


@pytest.mark.parametrize(("support", "p"), [(1, 2), (10, 1), (40, 2)])
def test_fewer_points_stay_above(support: int, p: int) -> None:
    x, x2 = gaussians(5, m=100, m2=80)
    result = federated_wasserstein(x, x2, support=support, iterations=8, p=p, generator=seeded())
    assert result.gamma.shape == (support, 5)
    assert (result.history > wasserstein_distance(x, x2, p=p)).all()


def test_a_run_is_reproducible_and_the_roles_exchange_points_and_numbers() -> None:
    x, x2 = gaussians(4, m=60, m2=50)
    client, server = TransportClient(x), TransportServer(x2)
    gamma = server.start(20, client.dim, seeded())
    for _ in range(3):
        eta, distance = client.answer(gamma)
        torch.testing.assert_close(distance, wasserstein_distance(x, gamma))
        before, gamma = gamma, server.step(eta, distance)
        torch.testing.assert_close(server.distance, distance + wasserstein_distance(before, x2))
    wired = federated_wasserstein(x, x2, support=20, iterations=3, generator=seeded())
    assert torch.equal(wired.gamma, gamma)
    assert torch.equal(wired.distance, server.distance)
    assert torch.equal(wired.eta, server.eta)


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
def test_distance_to_pots_shrinks_with_the_iterations() -> None:
    samples = three_gaussians()
    start = np.random.default_rng(0).normal(size=(100, 2)) + 3
    masses = [np.full(100, 0.01)] * 3
    reference = torch.from_numpy(ot.lp.free_support_barycenter([x.numpy() for x in samples], masses, start))
    found = [barycenter(samples, k).support_points for k in (1, 3, 10, 20)]
    distances = [float(wasserstein_distance(points, reference)) for points in found]
    assert distances[0] > distances[1] > distances[2] > distances[3]
    assert distances[3] < 0.3  # both are local solutions, of 100 points each
    assert objective(samples, found[3]) < 1.005 * objective(samples, reference)


def test_distances_are_those_to_the_barycenter() -> None:
    found = barycenter(three_gaussians(), 25)
    expected = torch.stack([wasserstein_distance(x, found.support_points) for x in three_gaussians()])
    torch.testing.assert_close(found.distances, expected, rtol=1e-2, atol=0)


def found_samples(support: int) -> float:
    """The share of 40 samples that a server which keeps to the protocol works out of two answers, to 1e-3: each row is
    half of a point of its own, which it takes off, and half of a mean of samples. Where S = m its points are one."""
    x = torch.rand(40, 5, generator=seeded())
    server = TransportServer(torch.rand(60, 5, generator=torch.Generator().manual_seed(1)))
    client, found = TransportClient(x, allow_reconstruction=True), []
    gamma = server.start(support, generator=seeded())
    for _ in range(2):
        eta, distance = client.answer(gamma)
        found.append(2 * eta - (gamma.mean(0) if support == len(x) else gamma))
        gamma = server.step(eta, distance)
    return float((torch.cdist(torch.cat(found).to(x), x).amin(0) < 1e-3).double().mean())


def test_samples_are_found_with_as_many_points_as_samples_and_not_with_the_safe_support() -> None:
    assert found_samples(40) == 1
    assert found_samples(safe_support(40)) == 0
