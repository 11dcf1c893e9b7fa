"""Dual potentials against POT, and the values of samples made of them."""

import numpy as np
import ot
import pytest
import torch
from functional.transport.samples import make_blobs, make_labeled
from numpy.testing import assert_allclose
from scipy.special import logsumexp
from torch.testing import assert_close

from flsv.functional import calibrated_gradient, client_values, label_embedding
from flsv.functional.transport.cost import squared_costs
from flsv.functional.transport.potentials import entropic_potentials, self_potential
from helpers import make_generator, warns


def label_augmented_cost(x, y, x2, y2):
    points = label_embedding(x, y)
    points2 = label_embedding(x2, y2)
    return squared_costs(points, points2)


def debiased_potential(x, x2, blur, y=None, y2=None):
    """The potential of ``x`` towards ``x2``, less that towards itself."""
    cost = label_augmented_cost(x, y, x2, y2)
    cost_to_itself = label_augmented_cost(x, y, x, y)
    eps = blur * float(cost.mean(dtype=torch.float64))
    potential, _ = entropic_potentials(cost, eps)
    return potential - self_potential(cost_to_itself, eps)


def potentials_by_pot(cost, eps):
    """POT's potentials of the rows and of the columns, of mean 0."""
    masses = [
        np.full(
            n,
            1 / n,
        )
        for n in cost.shape
    ]
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


@pytest.mark.by_turn
@pytest.mark.slow
@pytest.mark.parametrize("blur", [0.1, 0.01, 0.003])
def test_potentials_equal_those_of_pot_for_slowly_converging_problems(blur):
    """Turns alone need 70, 3,000 and 20,000 iterations for this."""
    x, y = make_labeled(0, m=40)
    x2, y2 = make_labeled(1, m=25)
    cost = label_augmented_cost(x, y, x2, y2)
    eps = blur * float(cost.mean())

    copied_cost = cost.clone()  # the call overwrites it
    potentials = entropic_potentials(copied_cost, eps)

    for potential, expected in zip(potentials, potentials_by_pot(cost, eps)):
        centered = potential - potential.mean()
        assert_allclose(centered, expected, atol=1e-4 * expected.std())


@pytest.mark.parametrize("blur", [0.1, 0.001])
def test_self_potential_is_a_fixed_point_of_the_symmetric_sinkhorn_update(blur):
    x, y = make_labeled(0, m=40)
    cost = label_augmented_cost(x, y, x, y)
    eps = blur * float(cost.mean())

    copied_cost = cost.clone()  # the call overwrites it
    potential = self_potential(copied_cost, eps).numpy()

    # f_i = -eps log mean_j exp((f_j - cost_ij) / eps)
    exponents = (potential - cost.numpy()) / eps
    log_means = logsumexp(
        exponents,
        axis=1,
    ) - np.log(len(x))
    assert_allclose(potential, -eps * log_means, atol=1e-3 * eps)


def test_potentials_that_do_not_converge_warn():
    x, _ = make_labeled(0, m=40)
    x2, _ = make_labeled(1, m=25)

    with warns("not converged after 5000 iterations"):
        debiased_potential(1e3 * x, 1e3 * x2, blur=1e-5)


@pytest.mark.parametrize("scale", [1e-3, 1e4])
def test_float32_potentials_at_any_scale_agree_with_float64(scale):
    x, _ = make_labeled(0)
    x2, _ = make_labeled(1, m=25)

    scaled = debiased_potential(
        scale * x.float(),
        scale * x2.float(),
        blur=0.02,
    )

    exact = debiased_potential(x, x2, blur=0.02)
    tolerance = 0.01 * float(exact.std())
    assert_close(
        (scaled / scale**2).double(),
        exact,
        atol=tolerance,
        rtol=0,
    )


def test_calibrated_gradient_equals_fedbarys_equation_11():
    f = torch.randn(9, generator=make_generator())
    expected = torch.stack([f[i] - (f.sum() - f[i]) / 8 for i in range(9)])
    assert_close(calibrated_gradient(f), expected)
    assert_close(calibrated_gradient(f + 100), expected, rtol=1e-3, atol=1e-4)
    assert calibrated_gradient(torch.tensor([5.0])).tolist() == [0.0]


@pytest.mark.slow
def test_features_and_labels_parts_sum_to_the_whole_value():
    x, y = make_blobs(60, 0)
    x2, y2 = make_blobs(40, 1)
    gamma = label_embedding(x2, y2)

    of_features = client_values(x, y, gamma, part="features")
    of_labels = client_values(x, y, gamma, part="labels")
    of_both = client_values(x, y, gamma, part="both")

    # The whole value is centered in each class.
    expected = of_features + 2 * of_labels
    for label in range(4):
        is_label = y == label
        expected[is_label] -= expected[is_label].mean()
    assert_close(of_both, expected, atol=1e-3, rtol=1e-3)
    assert float(of_both.sum()) == pytest.approx(
        0,
        abs=1e-2,
    )

    gradient = calibrated_gradient(debiased_potential(x, x2, 0.1))
    assert_close(of_features, gradient, atol=1e-3, rtol=1e-3)


def test_labels_part_is_the_difference_of_the_potentials_with_and_without_labels():
    x, y = make_blobs(60, 0)
    x2, y2 = make_blobs(40, 1)

    values = client_values(x, y, label_embedding(x2, y2), part="labels")

    cost = squared_costs(x, x2)
    eps = 0.1 * float(cost.mean(dtype=torch.float64))
    labeled_cost = label_augmented_cost(x, y, x2, y2)
    with_labels, _ = entropic_potentials(labeled_cost, eps)
    without_labels, _ = entropic_potentials(cost, eps)
    effect = with_labels - without_labels
    for label in range(4):
        is_label = y == label
        effect[is_label] -= effect[is_label].mean()
    expected = calibrated_gradient(effect)
    assert_close(values, expected, atol=1e-3, rtol=1e-3)


def test_values_without_labels_are_those_of_the_features():
    x, y = make_blobs(60, seed=0)
    x2, y2 = make_blobs(40, seed=1)
    gamma = label_embedding(x2, y2)

    of_features = client_values(x, None, x2)

    without_labels = client_values(x, None, gamma)
    features_of_both = client_values(x, y, gamma, part="features")
    assert torch.equal(without_labels, of_features)
    assert torch.equal(features_of_both, of_features)
