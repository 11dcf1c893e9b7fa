"""Inclusion probabilities against theorem 5.1 by bisection."""

import numpy as np
import pytest
import torch

from flsv.functional import importance_probabilities
from helpers import make_generator, refused


def probabilities_by_bisection(weights, m):
    """KKT of eq. 8: p_i = min(1, w_i / tau) with sum p = m."""
    low = 0.0
    high = weights.sum() / m * 10
    for _ in range(200):
        tau = (low + high) / 2
        if np.minimum(1, weights / max(tau, 1e-300)).sum() > m:
            low = tau
        else:
            high = tau

    return np.minimum(1, weights / tau)


@pytest.mark.parametrize(
    "m",
    [0.3, 1, 2, 3.5, 7, 11.9, 12],
)
def test_importance_probabilities_equal_the_optimum_by_bisection(m):
    for seed in range(20):
        weights = torch.rand(12, generator=make_generator(seed), dtype=torch.float64) ** 4 + 1e-6
        p = importance_probabilities(weights, m)
        np.testing.assert_allclose(
            p.numpy(),
            probabilities_by_bisection(weights.numpy(), m),
            atol=1e-6,
        )
        assert p.sum() == pytest.approx(m)
        assert p.max() <= 1


@pytest.mark.parametrize(
    ("weights", "m", "expected"),
    [
        (
            [0, 0, 0, 0],
            3,
            [0.75] * 4,
        ),
        (
            [2, 0, 0, 0],
            2,
            [1, 1 / 3, 1 / 3, 1 / 3],
        ),
        (
            [3, 1, 0],
            2,
            [1, 1, 0],
        ),
        (
            [1e-30, 1e30, 1e-30],
            2,
            [0.5, 1, 0.5],
        ),
    ],
)
def test_importance_probabilities_treat_ties_equally(weights, m, expected):
    assert importance_probabilities(
        torch.tensor(weights),
        m,
    ).tolist() == pytest.approx(expected)


def test_importance_probabilities_refuses_wrong_cohorts_and_weights():
    with refused("expected_cohort"):
        importance_probabilities(torch.ones(4), 4.5)
    with pytest.raises(ValueError, match=r"weights of clients \[1, 2\]"):
        importance_probabilities(
            torch.tensor([1.0, float("nan"), -1.0]),
            1,
        )
    with pytest.raises(ValueError, match="expected weights \\[n\\]"):
        importance_probabilities(torch.ones(2, 2), 1)
