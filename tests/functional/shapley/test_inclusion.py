"""Inclusion probabilities against theorem 5.1 by bisection."""

import numpy as np
import pytest
import torch

from flsv.functional import importance_probabilities
from helpers import make_generator


def probabilities_by_bisection(weights, m):
    """KKT of eq. 8: p_i = min(1, w_i / tau) with sum p = m."""
    low = 0.0
    high = weights.sum() / m * 10
    for _ in range(200):
        tau = (low + high) / 2
        if (
            np.minimum(
                1,
                weights / max(tau, 1e-300),
            ).sum()
            > m
        ):
            low = tau
        else:
            high = tau

    return np.minimum(1, weights / tau)


@pytest.mark.parametrize("m", [0.3, 1, 3.5, 11.9, 12])
def test_importance_probabilities_equal_the_optimum_by_bisection(m):
    for seed in range(20):
        weights = (
            torch.rand(
                12,
                generator=make_generator(seed),
                dtype=torch.float64,
            )
            ** 4
            + 1e-6
        )

        probabilities = importance_probabilities(weights, m)

        expected = probabilities_by_bisection(weights.numpy(), m)
        np.testing.assert_allclose(probabilities.numpy(), expected, atol=1e-6)
        assert probabilities.sum() == pytest.approx(m)
        assert probabilities.max() <= 1


@pytest.mark.parametrize(
    ("weights", "m", "expected"),
    [
        ([0, 0, 0, 0], 3, [0.75] * 4),
        (
            [2, 0, 0, 0],
            2,
            [1, 1 / 3, 1 / 3, 1 / 3],
        ),
        ([3, 1, 0], 2, [1, 1, 0]),
        (
            [1e-30, 1e30, 1e-30],
            2,
            [0.5, 1, 0.5],
        ),
    ],
)
def test_importance_probabilities_of_equal_weights_are_equal(weights, m, expected):
    probabilities = importance_probabilities(torch.tensor(weights), m)

    assert probabilities.tolist() == pytest.approx(expected)


@pytest.mark.parametrize(
    ("weights", "m", "message"),
    [
        (torch.ones(4), 4.5, "expected_cohort"),
        (
            torch.tensor([1.0, float("nan"), -1.0]),
            1,
            r"weights of clients \[1, 2\]",
        ),
        (torch.ones(2, 2), 1, r"expected weights \[n\]"),
    ],
)
def test_importance_probabilities_of_wrong_cohorts_or_weights_raise(weights, m, message):
    with pytest.raises(ValueError, match=message):
        importance_probabilities(weights, m)
