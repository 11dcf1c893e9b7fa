"""Exact distances against POT, SciPy and closed forms; shares against the formula."""

from __future__ import annotations

import numpy as np
import ot
import pytest
import scipy.stats
import torch
from functional.transport.test_statistics import labeled

from flsv.errors import ConfigurationError
from flsv.functional.transport import contribution_shares, label_augmented_cost, wasserstein_distance


@pytest.mark.parametrize("p", [1, 2])
def test_distance_is_pots(p: int) -> None:
    (x, y), (x2, y2) = labeled(0), labeled(1, m=25)
    cost = label_augmented_cost(x, y, x2, y2, label_weight=2.0).numpy()
    a, b = np.random.default_rng(0).dirichlet(np.ones(40)), np.full(25, 1 / 25)
    expected = ot.emd2(a, b, cost ** (p / 2)) ** (1 / p)
    found = wasserstein_distance(x, x2, y=y, y2=y2, p=p, weights=torch.from_numpy(5 * a), label_weight=2.0)
    assert float(found) == pytest.approx(expected, rel=1e-9)


def test_one_dimension_is_scipys() -> None:
    generator = torch.Generator().manual_seed(0)
    x, x2 = torch.randn(30, 1, generator=generator), torch.rand(20, 1, generator=generator)
    expected = scipy.stats.wasserstein_distance(x[:, 0], x2[:, 0])
    assert float(wasserstein_distance(x, x2, p=1)) == pytest.approx(expected, rel=1e-5)


def test_equal_sets_are_at_0_and_copies_of_the_whole_change_nothing() -> None:
    (x, y), (x2, y2) = labeled(0), labeled(1)
    order = torch.randperm(40, generator=torch.Generator().manual_seed(0))
    assert wasserstein_distance(x, x[order], y=y, y2=y[order]) == 0
    once = wasserstein_distance(x, x2, y=y, y2=y2)
    assert float(wasserstein_distance(x.repeat(3, 1), x2, y=y.repeat(3), y2=y2)) == pytest.approx(float(once), rel=1e-6)


def test_wrong_weights_and_p_say_so() -> None:
    x, _ = labeled(0)
    for weights in [torch.ones(3), -torch.ones(40), torch.zeros(40), torch.full((40,), torch.nan)]:
        with pytest.raises(ConfigurationError, match="weights: expected 40 finite masses"):
            wasserstein_distance(x, x, weights=weights)
    with pytest.raises(ConfigurationError, match=r"p=0\.5"):
        wasserstein_distance(x, x, p=0.5)


def test_shares_are_inverse_distances() -> None:
    distances = torch.tensor([1.0, 2.0, 4.0])
    torch.testing.assert_close(contribution_shares(distances), torch.tensor([4.0, 2.0, 1.0]) / 7)
    nan, inf = torch.nan, torch.inf
    shares = contribution_shares(torch.tensor([nan, 0.0, 3.0, 0.0]))
    assert shares.isnan().tolist() == [True, False, False, False]
    assert shares[1:].tolist() == [0.5, 0.0, 0.5]
    assert contribution_shares(torch.tensor([2.0, inf])).tolist() == [1.0, 0.0]
    assert contribution_shares(torch.tensor([1e-300, 1e-300], dtype=torch.float64)).tolist() == [0.5, 0.5]
    assert contribution_shares(torch.tensor([nan, nan])).isnan().all()
    with pytest.raises(ConfigurationError, match="at least 0"):
        contribution_shares(torch.tensor([-1.0, 1.0]))
