"""Potentials and the calibrated gradient against POT."""

import warnings

import numpy as np
import ot
import pytest
import torch
from functional.transport.samples import labeled
from scipy.special import logsumexp
from torch import Tensor

from flsv.functional import (
    calibrated_gradient,
    debiased_potential,
    label_augmented_cost,
)
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
def test_debiased_potential_equals_the_difference_of_the_pot_librarys_potentials(blur: float) -> None:
    (x, y), (x2, y2) = labeled(0, m=40), labeled(1, m=25)
    cost = label_augmented_cost(x, y, x2, y2)
    eps = blur * float(cost.mean())
    expected = reference(cost, eps) - reference(label_augmented_cost(x, y, x, y), eps)
    found = debiased_potential(x, x2, y=y, y2=y2, blur=blur)
    np.testing.assert_allclose(found - found.mean(), expected, atol=2e-3 * expected.std())


@pytest.mark.slow
@pytest.mark.parametrize("blur", [0.1, 0.01, 0.003])
def test_potentials_equal_pots_for_slowly_converging_problems(blur: float) -> None:
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
def test_self_potential_is_a_fixed_point_of_the_symmetric_sinkhorn_update(blur: float) -> None:
    x, y = labeled(0, m=40)
    cost = label_augmented_cost(x, y, x, y)
    eps = blur * float(cost.mean())
    f = self_potential(cost.clone(), eps, 0.7).numpy()
    again = -eps * (logsumexp((f - cost.numpy()) / eps, axis=1) - np.log(40))
    np.testing.assert_allclose(f, again, atol=1e-3 * eps)


def test_potentials_that_do_not_converge_warn() -> None:
    (x, _), (x2, _) = labeled(0, m=40), labeled(1, m=25)
    with pytest.warns(UserWarning, match=r"not settled after 5000 iterations: they may be off by .* raise eps"):
        debiased_potential(1e3 * x, 1e3 * x2, blur=1e-5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        debiased_potential(x, x2, blur=0.01)


@pytest.mark.parametrize("scale", [1e-3, 1e4])
def test_float32_potentials_at_any_scale_agree_with_float64(scale: float) -> None:
    (x, _), (x2, _) = labeled(0), labeled(1, m=25)
    exact = debiased_potential(x, x2, blur=0.02)
    found = debiased_potential(scale * x.float(), scale * x2.float(), blur=0.02) / scale**2
    torch.testing.assert_close(found.double(), exact, atol=0.01 * float(exact.std()), rtol=0)


def test_calibrated_gradient_equals_fedbarys_equation_11() -> None:
    f = torch.randn(9, generator=torch.Generator().manual_seed(0))
    expected = torch.stack([f[i] - (f.sum() - f[i]) / 8 for i in range(9)])
    torch.testing.assert_close(calibrated_gradient(f), expected)
    torch.testing.assert_close(calibrated_gradient(f + 100), expected, rtol=1e-3, atol=1e-4)
    assert calibrated_gradient(torch.tensor([5.0])).tolist() == [0.0]


def test_cost_matrix_larger_than_the_limit_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="random parts of at most"):
        entropic_potentials(torch.zeros(1).expand(20_000, 20_000), 0.1, 0.7)
