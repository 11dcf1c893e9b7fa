"""Values of samples: potentials, the protocol's, LAVA, and Shapley values of nearest neighbors."""

import warnings
from typing import Any

import numpy as np
import ot
import pytest
import torch
from functional.transport.test_distances import labeled
from scipy.special import logsumexp
from torch import Tensor

from flsv.functional import (
    calibrated_gradient,
    client_values,
    debiased_potential,
    direct_values,
    exact_shapley,
    knn_shapley,
    label_augmented_cost,
    label_embedding,
    lava,
)
from flsv.functional.transport.lava import class_distances
from flsv.functional.transport.potentials import entropic_potentials, self_potential
from flsv.utilities.errors import ConfigurationError


def reference(cost: Tensor, eps: float) -> np.ndarray:
    """POT's potential of the rows, of mean 0."""
    masses = [np.full(n, 1 / n) for n in cost.shape]
    log = ot.sinkhorn(*masses, cost.numpy(), eps, method="sinkhorn_log", numItermax=50_000, stopThr=1e-9, log=True)[1]
    assert log["err"][-1] < 1e-9
    return eps * (log["log_u"] - log["log_u"].mean())


@pytest.mark.slow
@pytest.mark.parametrize("blur", [0.5, 0.1])
def test_debiased_potential_is_the_difference_of_pots(blur: float) -> None:
    (x, y), (x2, y2) = labeled(0, m=40), labeled(1, m=25)
    cost = label_augmented_cost(x, y, x2, y2)
    eps = blur * float(cost.mean())
    expected = reference(cost, eps) - reference(label_augmented_cost(x, y, x, y), eps)
    found = debiased_potential(x, x2, y=y, y2=y2, blur=blur)
    np.testing.assert_allclose(found - found.mean(), expected, atol=2e-3 * expected.std())


@pytest.mark.slow
@pytest.mark.parametrize("blur", [0.1, 0.01, 0.003])
def test_potentials_are_pots_however_slowly_turns_converge(blur: float) -> None:
    """Turns alone need 70, 3,000 and 20,000 iterations for this."""
    (x, y), (x2, y2) = labeled(0, m=40), labeled(1, m=25)
    cost = label_augmented_cost(x, y, x2, y2)
    eps = blur * float(cost.mean())
    f, g = entropic_potentials(cost.clone(), eps, 0.7)
    expected = reference(cost, eps)
    np.testing.assert_allclose(f - f.mean(), expected, atol=1e-4 * expected.std())
    expected = reference(cost.T, eps)
    np.testing.assert_allclose(g - g.mean(), expected, atol=1e-4 * expected.std())


@pytest.mark.parametrize("blur", [0.1, 0.001])
def test_a_sets_potential_towards_itself_is_the_symmetric_one(blur: float) -> None:
    x, y = labeled(0, m=40)
    cost = label_augmented_cost(x, y, x, y)
    eps = blur * float(cost.mean())
    f = self_potential(cost.clone(), eps, 0.7).numpy()
    again = -eps * (logsumexp((f - cost.numpy()) / eps, axis=1) - np.log(40))
    np.testing.assert_allclose(f, again, atol=1e-3 * eps)


def test_what_does_not_settle_is_said() -> None:
    (x, _), (x2, _) = labeled(0, m=40), labeled(1, m=25)
    with pytest.warns(UserWarning, match=r"not settled after 5000 iterations: they may be off by .* raise eps"):
        debiased_potential(1e3 * x, 1e3 * x2, blur=1e-5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        debiased_potential(x, x2, blur=0.01)


@pytest.mark.parametrize("scale", [1e-3, 1e4])
def test_float32_at_any_scale_agrees_with_float64(scale: float) -> None:
    (x, _), (x2, _) = labeled(0), labeled(1, m=25)
    exact = debiased_potential(x, x2, blur=0.02)
    found = debiased_potential(scale * x.float(), scale * x2.float(), blur=0.02) / scale**2
    torch.testing.assert_close(found.double(), exact, atol=0.01 * float(exact.std()), rtol=0)


def test_calibrated_gradient_is_equation_11() -> None:
    f = torch.randn(9, generator=torch.Generator().manual_seed(0))
    expected = torch.stack([f[i] - (f.sum() - f[i]) / 8 for i in range(9)])
    torch.testing.assert_close(calibrated_gradient(f), expected)
    torch.testing.assert_close(calibrated_gradient(f + 100), expected, rtol=1e-3, atol=1e-4)
    assert calibrated_gradient(torch.tensor([5.0])).tolist() == [0.0]


def test_more_than_memory_holds_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="random parts of at most"):
        entropic_potentials(torch.zeros(1).expand(20_000, 20_000), 0.1, 0.7)


def blobs(count: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    y = torch.randint(4, (count,), generator=generator)
    centers = 2 * torch.randn(4, 8, generator=torch.Generator().manual_seed(9))
    return torch.randn(count, 8, generator=generator) + centers[y], y


def test_parts_add_up_and_the_features_part_is_the_debiased_potential() -> None:
    (x, y), (x2, y2) = blobs(60, 0), blobs(40, 1)
    parts = {part: direct_values(x, y, x2, y2, part=part) for part in ("features", "labels", "both")}  # type: ignore[arg-type]
    expected = parts["features"] + 2 * parts["labels"]
    for label in range(4):
        expected[y == label] -= expected[y == label].mean()
    torch.testing.assert_close(parts["both"], expected, atol=1e-3, rtol=1e-3)
    torch.testing.assert_close(parts["features"], calibrated_gradient(debiased_potential(x, x2)), atol=1e-3, rtol=1e-3)
    assert float(parts["both"].sum()) == pytest.approx(0, abs=1e-2)


def test_the_servers_embedding_as_gamma_is_direct_access() -> None:
    (x, y), (x2, y2) = blobs(60, 0), blobs(40, 1)
    direct = direct_values(x, y, x2, y2, label_weight=2.0)
    found = client_values(x, y, label_embedding(x2, y2, label_weight=2.0), label_weight=2.0)
    torch.testing.assert_close(found, direct, atol=1e-2, rtol=1e-2)
    unlabeled = direct_values(x, None, x2, y2)
    torch.testing.assert_close(client_values(x, None, x2), unlabeled)
    torch.testing.assert_close(client_values(x, None, label_embedding(x2, y2)), unlabeled)
    assert torch.equal(direct_values(x, y, x2, None), unlabeled)


def test_one_sample_and_absent_classes_have_finite_values() -> None:
    x, y = labeled(0)
    assert direct_values(x[:1], y[:1], x, y).tolist() == [0.0]
    assert direct_values(x, y, x[y == 0], y[y == 0]).isfinite().all()


def flipped(y: Tensor, share: float, classes: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    bad = torch.rand(len(y), generator=generator) < share
    return torch.where(bad, (y + torch.randint(1, classes, y.shape, generator=generator)) % classes, y), bad


def reference_inner(x: np.ndarray, y: np.ndarray, x2: np.ndarray, y2: np.ndarray) -> np.ndarray:
    """Squared W_2 of the classes' samples."""
    rows = [[ot.emd2([], [], ot.dist(x[y == a], x2[y2 == b])) for b in np.unique(y2)] for a in np.unique(y)]
    return np.array(rows)


def lava_dual(x: np.ndarray, y: np.ndarray, x2: np.ndarray, y2: np.ndarray, c: float, eps: float) -> np.ndarray:
    """The dual on the first side, up to a constant; towards the same samples the symmetric one, by its fixed point."""
    between = reference_inner(x, y, x2, y2)
    rows, columns = np.unique(y, return_inverse=True)[1], np.unique(y2, return_inverse=True)[1]
    cost = ot.dist(x, x2) / 2 + c * between[rows][:, columns] / 2
    a, b = np.full(len(x), 1 / len(x)), np.full(len(x2), 1 / len(x2))
    if x is x2:
        f = np.zeros(len(x))
        for _ in range(2000):
            f = (f - eps * logsumexp((f - cost) / eps - np.log(len(x)), axis=1)) / 2
        return f
    log = ot.sinkhorn(a, b, cost, eps, method="sinkhorn_log", numItermax=5_000, stopThr=1e-9, log=True)[1]
    return eps * log["log_u"]


def lava_reference(x: Tensor, y: Tensor, x2: Tensor, y2: Tensor, c: float, eps: float) -> np.ndarray:
    """The calibrated gradient, sample by sample."""
    sides = x.numpy(), y.numpy(), x2.numpy(), y2.numpy()
    f = lava_dual(*sides, c, eps) - lava_dual(*sides[:2], *sides[:2], c, eps)
    m = len(f)
    return np.array([f[i] - sum(f[j] for j in range(m) if j != i) / (m - 1) for i in range(m)])


@pytest.mark.parametrize("weight", [3.0, 0.0])
def test_as_pots_duals(weight: float) -> None:
    (x, y), (x2, y2) = blobs(40, 0), blobs(25, 1)
    x, x2, eps = x.double(), x2.double(), 4.0
    y, _ = flipped(y, 0.2, 4)
    found = lava(x, y, x2, y2, label_weight=weight, eps=eps)
    expected = lava_reference(x, y, x2, y2, weight, eps)
    np.testing.assert_allclose(found.numpy(), expected, atol=1e-3 * np.abs(expected).max())
    assert float(found.sum()) == pytest.approx(0, abs=1e-9)


def test_class_distances() -> None:
    (x, y), (x2, y2) = blobs(60, 0), blobs(50, 1)
    kept = y2 != 2
    x2, y2 = x2[kept], y2[kept]
    exact = class_distances(x, y, x2, y2)
    assert exact.shape == (4, 3)
    np.testing.assert_allclose(
        exact, reference_inner(*(t.numpy() for t in (x.double(), y, x2.double(), y2))), rtol=1e-9
    )
    own = class_distances(x, y, x, y)
    assert torch.equal(own, own.T)
    torch.testing.assert_close(own, class_distances(x, y, x.clone(), y))
    assert (own.diag() == 0).all()


def test_gaussian_class_distances_are_bures() -> None:
    (x, y), (x2, y2) = blobs(100, 0), blobs(80, 1)
    x = x.double() @ torch.randn(8, 8, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    found = class_distances(x, y, x2, y2, inner="gaussian")
    for a in range(4):
        for b in range(4):
            one, two = x[y == a].numpy(), x2.double()[y2 == b].numpy()
            moments = one.mean(0), two.mean(0), np.cov(one.T, bias=True), np.cov(two.T, bias=True)
            assert float(found[a, b]) == pytest.approx(ot.gaussian.bures_wasserstein_distance(*moments) ** 2, rel=1e-6)
    assert torch.allclose(class_distances(x, y, x, y, inner="gaussian").diag(), torch.zeros(4).double(), atol=1e-9)
    single = class_distances(x[:1], y[:1], x2[:1], y2[:1], inner="gaussian")
    assert float(single) == pytest.approx(float((x[0] - x2[0]).square().sum()))


@pytest.mark.parametrize("inner", ["exact", "gaussian"])
def test_the_numbers_of_classes_do_not_matter(inner: Any) -> None:
    (x, y), (x2, y2) = blobs(60, 0), blobs(40, 1)
    noisy, _ = flipped(y, 0.15, 4)
    torch.testing.assert_close(lava(x, noisy, x2, 7 - 2 * y2, inner=inner), lava(x, noisy, x2, y2, inner=inner))


@pytest.mark.parametrize("m", [1, 2, 7])
@pytest.mark.parametrize("k", [1, 5, 9])
def test_values_are_shapleys(m: int, k: int) -> None:
    rng = np.random.default_rng(m)
    x, x2, y, y2 = rng.normal(size=(m, 2)), rng.normal(size=(3, 2)), rng.integers(0, 2, m), rng.integers(0, 2, 3)

    def value(mask: Tensor) -> float:
        total = 0.0
        for sample, label in zip(x2, y2):
            nearest = sorted(mask.nonzero().flatten().tolist(), key=lambda i: ((x[i] - sample) ** 2).sum())[:k]
            total += sum(y[i] == label for i in nearest) / k
        return total / len(x2)

    expected = exact_shapley(lambda masks: torch.tensor([value(mask) for mask in masks], dtype=torch.float64), m)
    found = knn_shapley(*(torch.from_numpy(a) for a in (x, y, x2, y2)), k=k)
    np.testing.assert_allclose(found, expected.values, atol=1e-12)
