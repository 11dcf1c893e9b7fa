"""Dual potentials against POT, and the values of samples made of them."""

import warnings

import numpy as np
import ot
import pytest
import torch
from functional.transport.samples import make_blobs, make_labeled
from scipy.special import logsumexp
from torch import Tensor

from flsv.functional import (
    calibrated_gradient,
    client_values,
    direct_values,
    label_augmented_cost,
    label_embedding,
)
from flsv.functional.transport.potentials import entropic_potentials, self_potential

#: By which eps falls from stage to stage: it changes how fast potentials converge, not what they are.
SCALING = 0.7


def debiased_potential(
    x: Tensor,
    x2: Tensor,
    blur: float,
    y: Tensor | None = None,
    y2: Tensor | None = None,
) -> Tensor:
    """The potential of ``x`` towards ``x2``, less that towards itself."""
    cost = label_augmented_cost(x, y, x2, y2)
    cost_to_itself = label_augmented_cost(x, y, x, y)
    eps = blur * float(cost.mean(dtype=torch.float64))
    potential, _ = entropic_potentials(cost, eps, SCALING)
    return potential - self_potential(cost_to_itself, eps, SCALING)


def potentials_by_pot(cost: Tensor, eps: float) -> list[np.ndarray]:
    """POT's potentials of the rows and of the columns, of mean 0."""
    masses = [np.full(n, 1 / n) for n in cost.shape]
    _, log = ot.sinkhorn(
        *masses,
        cost.numpy(),
        eps,
        method="sinkhorn_log",
        numItermax=50_000,
        stopThr=1e-9,
        log=True,
    )
    assert log["err"][-1] < 1e-9

    potentials = []
    for side in ("log_u", "log_v"):
        potential = eps * log[side]
        potentials.append(potential - potential.mean())
    return potentials


@pytest.mark.slow
@pytest.mark.parametrize("blur", [0.1, 0.01, 0.003])
def test_potentials_equal_those_of_pot_for_slowly_converging_problems(blur: float) -> None:
    """Turns alone need 70, 3,000 and 20,000 iterations for this."""
    x, y = make_labeled(0, m=40)
    x2, y2 = make_labeled(1, m=25)
    cost = label_augmented_cost(x, y, x2, y2)
    eps = blur * float(cost.mean())

    copied_cost = cost.clone()  # the call overwrites it
    potentials = entropic_potentials(copied_cost, eps, SCALING)

    for potential, expected in zip(potentials, potentials_by_pot(cost, eps)):
        centered = potential - potential.mean()
        np.testing.assert_allclose(
            centered,
            expected,
            atol=1e-4 * expected.std(),
        )


@pytest.mark.parametrize("blur", [0.1, 0.001])
def test_self_potential_is_a_fixed_point_of_the_symmetric_sinkhorn_update(blur: float) -> None:
    x, y = make_labeled(0, m=40)
    cost = label_augmented_cost(x, y, x, y)
    eps = blur * float(cost.mean())

    copied_cost = cost.clone()  # the call overwrites it
    potential = self_potential(copied_cost, eps, SCALING).numpy()

    # f_i = -eps log mean_j exp((f_j - cost_ij) / eps)
    exponents = (potential - cost.numpy()) / eps
    log_means = logsumexp(exponents, axis=1) - np.log(len(x))
    np.testing.assert_allclose(potential, -eps * log_means, atol=1e-3 * eps)


def test_potentials_that_do_not_converge_warn() -> None:
    x, _ = make_labeled(0, m=40)
    x2, _ = make_labeled(1, m=25)

    with pytest.warns(
        UserWarning, match=r"not settled after 5000 iterations: they may be off by .* raise eps"
    ):
        debiased_potential(1e3 * x, 1e3 * x2, blur=1e-5)


@pytest.mark.parametrize("scale", [1e-3, 1e4])
def test_float32_potentials_at_any_scale_agree_with_float64(scale: float) -> None:
    x, _ = make_labeled(0)
    x2, _ = make_labeled(1, m=25)

    scaled = debiased_potential(
        scale * x.float(),
        scale * x2.float(),
        blur=0.02,
    )

    exact = debiased_potential(x, x2, blur=0.02)
    tolerance = 0.01 * float(exact.std())

    torch.testing.assert_close(
        (scaled / scale**2).double(),
        exact,
        atol=tolerance,
        rtol=0,
    )


def test_calibrated_gradient_equals_fedbarys_equation_11() -> None:
    f = torch.randn(9, generator=torch.Generator().manual_seed(0))
    expected = torch.stack([f[i] - (f.sum() - f[i]) / 8 for i in range(9)])
    torch.testing.assert_close(calibrated_gradient(f), expected)
    torch.testing.assert_close(calibrated_gradient(f + 100), expected, rtol=1e-3, atol=1e-4)
    assert calibrated_gradient(torch.tensor([5.0])).tolist() == [0.0]


def test_potentials_that_converge_do_not_warn() -> None:
    x, _ = make_labeled(0, m=40)
    x2, _ = make_labeled(1, m=25)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        debiased_potential(x, x2, blur=0.01)


def test_features_and_labels_parts_sum_to_the_whole_value() -> None:
    x, y = make_blobs(60, 0)
    x2, y2 = make_blobs(40, 1)

    of_features = direct_values(x, y, x2, y2, part="features")
    of_labels = direct_values(x, y, x2, y2, part="labels")
    of_both = direct_values(x, y, x2, y2, part="both")

    # The whole value is centered in each class.
    expected = of_features + 2 * of_labels
    for label in range(4):
        is_label = y == label
        expected[is_label] -= expected[is_label].mean()
    torch.testing.assert_close(of_both, expected, atol=1e-3, rtol=1e-3)
    assert float(of_both.sum()) == pytest.approx(0, abs=1e-2)

    gradient = calibrated_gradient(debiased_potential(x, x2, 0.1))
    torch.testing.assert_close(of_features, gradient, atol=1e-3, rtol=1e-3)


def test_client_values_with_the_servers_embedding_equal_direct_values() -> None:
    x, y = make_blobs(60, 0)
    x2, y2 = make_blobs(40, 1)
    embedding = label_embedding(x2, y2, label_weight=2.0)

    values = client_values(x, y, embedding, label_weight=2.0)

    direct = direct_values(x, y, x2, y2, label_weight=2.0)
    torch.testing.assert_close(values, direct, atol=1e-2, rtol=1e-2)


def test_values_without_labels_are_those_of_the_features() -> None:
    client_x, client_y = make_blobs(60, seed=0)
    server_x, server_y = make_blobs(40, seed=1)

    without_client_labels = direct_values(client_x, None, server_x, server_y)
    without_server_labels = direct_values(client_x, client_y, server_x, None)
    of_features = client_values(client_x, None, server_x)
    of_embedding = client_values(client_x, None, label_embedding(server_x, server_y))

    torch.testing.assert_close(of_features, without_client_labels)
    torch.testing.assert_close(of_embedding, without_client_labels)
    assert torch.equal(without_server_labels, without_client_labels)
