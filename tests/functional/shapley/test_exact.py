"""Values by enumeration: Shapley, Banzhaf, Beta Shapley, leave-one-out; normalized ones, and theorem 5.1."""

import itertools
import math
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from functional.shapley.games import Watched, accuracy_table, random_table, rng, table_game
from scipy import special

from flsv.functional import (
    banzhaf,
    beta_shapley,
    exact_shapley,
    importance_probabilities,
    leave_one_out,
    normalize_shapley,
)
from flsv.functional.shapley.beta import beta_weights
from flsv.utilities.errors import ConfigurationError

#: Of a coalition of s that the player joins, of n players.
Weight = Callable[[int, int], float]


def of_beta(alpha: float, beta: float) -> Weight:
    return lambda n, s: special.beta(s + beta, n - 1 - s + alpha) / special.beta(alpha, beta)


BETAS = [(1.0, 1.0), (16.0, 1.0), (1.0, 4.0), (0.5, 2.5)]
SEMIVALUES: dict[str, tuple[Any, Weight]] = {
    "shapley": (exact_shapley, lambda n, s: 1 / (n * math.comb(n - 1, s))),
    "banzhaf": (banzhaf, lambda n, s: 1 / 2 ** (n - 1)),
    "leave one out": (leave_one_out, lambda n, s: float(s == n - 1)),
    **{f"beta {a}, {b}": (partial(beta_shapley, alpha=a, beta=b), of_beta(a, b)) for a, b in BETAS},
}


def reference(table: torch.Tensor, weight: Weight) -> torch.Tensor:
    """Every coalition that a player can join, one by one."""
    n = len(table).bit_length() - 1
    values = torch.zeros(n, *table.shape[1:], dtype=torch.float64)
    for i, coalition in itertools.product(range(n), range(2**n)):
        if not coalition >> i & 1:
            values[i] += weight(n, coalition.bit_count()) * (table[coalition | 1 << i] - table[coalition])
    return values


@pytest.mark.parametrize("n", range(1, 7))
@pytest.mark.parametrize("name", SEMIVALUES)
def test_semivalues_of_random_tables(name: str, n: int) -> None:
    estimator, weight = SEMIVALUES[name]
    for columns in (None, 2):
        table = random_table(n, n, columns)
        estimate = estimator(Watched(table_game(table)), n)
        torch.testing.assert_close(estimate.values, reference(table, weight))
        assert estimate.evaluations == (n + 1 if name == "leave one out" else 2**n)
        assert (estimate.stderr == 0).all()


@pytest.mark.parametrize("name", ["banzhaf", "beta 16.0, 1.0", "beta 1.0, 4.0"])
@pytest.mark.parametrize("budget", [24, 45])
def test_unbiased_within_budget(name: str, budget: int) -> None:
    (estimator, weight), table, runs = SEMIVALUES[name], accuracy_table(6), []
    for seed in range(200):
        utility = Watched(table_game(table))
        runs.append(estimator(utility, 6, budget=budget, generator=rng(seed)))
        assert runs[-1].evaluations == len(utility.seen) <= budget
    values = torch.stack([run.values for run in runs])
    error = values.mean(dim=0) - reference(table, weight)
    assert (error.abs() <= 4 * values.std(dim=0) / 200**0.5 + 1e-9).all()
    if name == "banzhaf":
        claimed = torch.stack([run.stderr for run in runs]).square().mean(dim=0).sqrt()
        assert ((claimed / values.std(dim=0) - 1).abs() < 0.25).all()
        few = banzhaf(table_game(table), 6, budget=3, generator=rng())
        assert few.evaluations == 3
        assert few.stderr.isnan().all()


@pytest.mark.parametrize("estimator", [exact_shapley, banzhaf])
def test_too_many_players_fail_at_once_and_name_the_cost(estimator: Any) -> None:
    with pytest.raises(ConfigurationError, match=re.escape("2^25 = 33,554,432 evaluations")):
        estimator(lambda masks: pytest.fail("evaluated"), 25)


def test_weights_of_thousands_are_finite() -> None:
    many = torch.tensor(beta_weights(2000, 16, 1))
    assert many.isfinite().all()
    assert many.sum().item() == pytest.approx(1)


NAN = float("nan")


@pytest.mark.parametrize(
    ("values", "how", "expected"),
    [
        ([[1.0, 5.0], [2.0, 5.0], [NAN, 5.0], [5.0, NAN]], "min-max", [[0, 0.5], [0.25, 0.5], [NAN, 0.5], [1, NAN]]),
        ([1e9, 1e9, 1e9], "min-max", [0.5] * 3),
        ([-0.2, -0.2, -0.2 * (1 + 1e-15)], "min-max", [0.5] * 3),
        ([NAN, 2.0], "min-max", [NAN, 0.5]),
        ([], "min-max", []),
        ([-1.0, 0.0, 2.0, 4.0, NAN], "positive", [0.0, 0.0, 0.5, 1.0, NAN]),
        ([-2.0, -1.0], "positive", [0.0, 0.0]),
        ([1e-16, 1.0], "positive", [0.0, 1.0]),  # what is left of a null player's 0
    ],
)
def test_normalized(values: Any, how: Any, expected: Any) -> None:
    found = normalize_shapley(torch.tensor(values, dtype=torch.float64), how)
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), equal_nan=True)


def test_infinite_values_are_not_normalized() -> None:
    with pytest.raises(ValueError, match=r"players \[1\] are infinite"):
        normalize_shapley(torch.tensor([1.0, float("inf")]))


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


@pytest.mark.parametrize("m", [0.3, 1, 2, 3.5, 7, 11.9, 12])
def test_importance_is_the_optimum(m: float) -> None:
    for seed in range(20):
        weights = torch.rand(12, generator=rng(seed), dtype=torch.float64) ** 4 + 1e-6
        p = importance_probabilities(weights, m)
        np.testing.assert_allclose(p.numpy(), by_bisection(weights.numpy(), m), atol=1e-6)
        assert p.sum() == pytest.approx(m)
        assert p.max() <= 1


@pytest.mark.parametrize(
    ("weights", "m", "expected"),
    [
        ([1, 1, 1, 1], 2, [0.5] * 4),
        ([5, 5, 1, 1], 3, [1, 1, 0.5, 0.5]),
        ([0, 0, 0, 0], 3, [0.75] * 4),
        ([2, 0, 0, 2], 1, [0.5, 0, 0, 0.5]),
        ([2, 0, 0, 0], 2, [1, 1 / 3, 1 / 3, 1 / 3]),
        ([3, 1, 0], 2, [1, 1, 0]),
        ([1e-30, 1e30, 1e-30], 2, [0.5, 1, 0.5]),
        ([3, 2, 1, 0], 4, [1, 1, 1, 1]),
    ],
)
def test_importance_of_ties_and_zeros(weights: list[float], m: float, expected: list[float]) -> None:
    assert importance_probabilities(torch.tensor(weights), m).tolist() == pytest.approx(expected)


def test_errors_of_importance() -> None:
    with pytest.raises(ConfigurationError, match="expected_cohort"):
        importance_probabilities(torch.ones(4), 4.5)
    with pytest.raises(ValueError, match=r"weights of clients \[1, 2\]"):
        importance_probabilities(torch.tensor([1.0, float("nan"), -1.0]), 1)
    with pytest.raises(ValueError, match="expected \\[n\\]"):
        importance_probabilities(torch.ones(2, 2), 1)


def test_eq_12() -> None:
    values = torch.randn(7, generator=rng(), dtype=torch.float64)
    for k in range(7):
        differences = values[k] - values
        literal = (differences.max() - differences) / (differences.max() - differences.min())
        torch.testing.assert_close(normalize_shapley(-differences), literal)
        torch.testing.assert_close(normalize_shapley(values), literal)
