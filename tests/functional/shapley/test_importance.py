"""Theorem 5.1, against the optimum found by bisection and against the best of its proof's candidates."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from functional.shapley.games import rng

from flsv.errors import ConfigurationError
from flsv.functional.shapley import importance_probabilities


def by_bisection(weights: np.ndarray, m: float) -> np.ndarray:
    """KKT of eq. 8: p_i = min(1, w_i / tau) with sum p = m."""
    low, high = 0.0, weights.sum() / m * 10
    for _ in range(200):
        tau = (low + high) / 2
        if np.minimum(1, weights / max(tau, 1e-300)).sum() > m:
            low = tau
        else:
            high = tau
    return np.minimum(1, weights / tau)


def candidate(weights: np.ndarray, m: int, certain: int) -> np.ndarray:
    """Eq. 9 for one l, feasible or not; weights in descending order."""
    p = np.ones_like(weights)
    p[certain:] = (m - certain) * weights[certain:] / weights[certain:].sum()
    return p


@pytest.mark.parametrize("m", [0.3, 1, 2, 3.5, 7, 11.9, 12])
def test_optimum(m: float) -> None:
    for seed in range(20):
        weights = torch.rand(12, generator=rng(seed), dtype=torch.float64) ** 4 + 1e-6
        p = importance_probabilities(weights, m)
        np.testing.assert_allclose(p.numpy(), by_bisection(weights.numpy(), m), atol=1e-6)
        assert p.sum() == pytest.approx(m)
        assert p.min() >= 0
        assert p.max() <= 1


@pytest.mark.slow
def test_theorem_with_the_proofs_restriction_by_brute_force() -> None:
    """Of the m candidates those in [0, 1], of these the smallest objective (C.1): ours, at all of 2000 random weights.

    The restriction matters: without it a candidate with a probability above 1 often has the smallest objective.
    """
    generator, infeasible = np.random.default_rng(0), 0
    for _ in range(2000):
        n = int(generator.integers(2, 10))
        m = int(generator.integers(1, n + 1))
        weights = np.sort(generator.random(n) ** generator.integers(1, 8) + 1e-9)[::-1].copy()
        candidates = [candidate(weights, m, certain) for certain in range(m)]
        objective = np.array([(weights**2 / p).sum() for p in candidates])
        proper = np.array([p.max() <= 1 + 1e-12 for p in candidates])
        best = candidates[int(np.where(proper, objective, np.inf).argmin())]
        ours = importance_probabilities(torch.from_numpy(weights), m).numpy()
        np.testing.assert_allclose(ours, best, atol=1e-9)
        infeasible += not proper[objective.argmin()]
    assert 500 < infeasible < 2000


def test_smallest_feasible_is_best_of_the_feasible() -> None:
    for seed in range(50):
        weights = np.sort(torch.rand(8, generator=rng(seed), dtype=torch.float64).numpy() ** 5)[::-1].copy()
        ours = importance_probabilities(torch.from_numpy(weights), 4).numpy()
        feasible = [p for p in (candidate(weights, 4, certain) for certain in range(4)) if p.max() <= 1 + 1e-12]
        best = min((weights**2 / p).sum() for p in feasible)
        assert (weights**2 / ours).sum() == pytest.approx(best)


def test_ties_and_zeros() -> None:
    def p(weights: list[float], m: float) -> list[float]:
        return importance_probabilities(torch.tensor(weights), m).tolist()

    assert p([1, 1, 1, 1], 2) == [0.5] * 4
    assert p([5, 5, 1, 1], 3) == [1, 1, 0.5, 0.5]
    assert p([0, 0, 0, 0], 3) == [0.75] * 4
    assert p([2, 0, 0, 2], 1) == [0.5, 0, 0, 0.5]
    assert p([2, 0, 0, 0], 2) == pytest.approx([1, 1 / 3, 1 / 3, 1 / 3])
    assert p([3, 1, 0], 2) == [1, 1, 0]
    assert p([1e-30, 1e30, 1e-30], 2) == [0.5, 1, 0.5]
    assert p([7], 1) == [1]
    assert p([3, 2, 1, 0], 4) == [1, 1, 1, 1]


def test_errors() -> None:
    for m in (0, -1, 4.5, float("nan")):
        with pytest.raises(ConfigurationError, match="expected_cohort"):
            importance_probabilities(torch.ones(4), m)
    for bad in (float("nan"), float("inf"), -1.0):
        with pytest.raises(ValueError, match=r"weights of clients \[2\]"):
            importance_probabilities(torch.tensor([1.0, 1.0, bad]), 1)
    with pytest.raises(ValueError, match="expected \\[n\\]"):
        importance_probabilities(torch.ones(2, 2), 1)
