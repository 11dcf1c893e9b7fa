"""Ridge regression from sums, against scikit-learn on the pooled samples."""

import numpy as np
import pytest
import torch
from sklearn.decomposition import PCA
from sklearn.linear_model import Ridge

from flsv.functional.ridge import principal_axes, ridge_statistics, ridge_weights
from flsv.functional.shapley.enumeration import all_coalitions


@pytest.mark.parametrize("penalty", [0.1, 1.0, 30.0])
def test_every_coalition_is_fitted_as_scikit_learn_fits_the_pooled_samples(penalty: float) -> None:
    draw = torch.Generator().manual_seed(0)
    sizes = (3, 20, 7, 1)  # fewer samples than features, too
    x = [torch.randn(size, 6, generator=draw, dtype=torch.float64) + 5 * k for k, size in enumerate(sizes)]
    y = [torch.randn(size, 2, generator=draw, dtype=torch.float64) for size in sizes]
    gram, moments = (torch.stack(part) for part in zip(*map(ridge_statistics, x, y)))
    masks = all_coalitions(4)
    some = masks.double()
    sums = torch.einsum("kn,nij->kij", some, gram), torch.einsum("kn,nij->kij", some, moments)
    found = ridge_weights(*sums, penalty)
    assert not found[0].any()  # nobody
    for mask, weights in zip(masks[1:], found[1:]):
        members = mask.nonzero().flatten().tolist()
        pooled = [torch.cat([part[i] for i in members]).numpy() for part in (x, y)]
        reference = Ridge(alpha=penalty).fit(*pooled)
        np.testing.assert_allclose(weights[:-1].T, reference.coef_, rtol=1e-6, atol=1e-9)
        np.testing.assert_allclose(weights[-1], reference.intercept_, rtol=1e-6, atol=1e-9)


def test_principal_axes_equal_scikit_learns_at_a_total_variance_of_one() -> None:
    x = torch.randn(50, 8, generator=torch.Generator().manual_seed(1)).double() * torch.arange(1, 9)
    mean, axes = principal_axes(x, 3)
    reference = PCA(3).fit(x.numpy())
    mine, theirs = ((x - mean) @ axes.T).numpy(), reference.transform(x.numpy())
    theirs /= np.sqrt(theirs.var(0).sum())
    np.testing.assert_allclose(np.abs(mine), np.abs(theirs), rtol=1e-6, atol=1e-9)


def test_constant_features_have_no_axis_and_nan_samples_are_ignored() -> None:
    x = torch.tensor([[1.0, 2.0], [3.0, 2.0]])
    assert principal_axes(x, 5)[1].shape == (1, 2)
    assert principal_axes(torch.ones(4, 3), 5)[1].shape == (0, 3)
    y = torch.ones(3, 1)
    broken = torch.tensor([[1.0], [float("nan")], [2.0]])
    for mine, wanted in zip(ridge_statistics(broken, y), ridge_statistics(broken[[0, 2]], y[:2])):
        assert torch.equal(mine, wanted)
    gram, moments = ridge_statistics(torch.empty(0, 2), torch.empty(0, 1))
    assert not gram.any()
    assert not moments.any()
