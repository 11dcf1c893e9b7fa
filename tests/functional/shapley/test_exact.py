"""Values by enumeration: Shapley, Banzhaf, Beta Shapley, leave-one-out; normalized ones, and theorem 5.1."""

from __future__ import annotations

import itertools
import re

import numpy as np
import pytest
import torch
from functional.shapley.games import (
    Watched,
    accuracy_table,
    closed_form_games,
    random_table,
    reference_shapley,
    rng,
    table_game,
)
from scipy import integrate, special

from flsv.errors import ConfigurationError
from flsv.functional import (
    banzhaf,
    beta_shapley,
    exact_shapley,
    importance_probabilities,
    leave_one_out,
    normalize_shapley,
)
from flsv.functional.shapley.other_values import beta_weights


@pytest.mark.parametrize("n", range(1, 7))
def test_random_tables(n: int) -> None:
    for seed, columns in itertools.product(range(3), (None, 3)):
        table = random_table(n, seed, columns)
        estimate = exact_shapley(Watched(table_game(table)), n)
        torch.testing.assert_close(estimate.values, torch.from_numpy(reference_shapley(table)))


@pytest.mark.parametrize("estimator", [exact_shapley, banzhaf])
def test_too_many_players_fail_at_once_and_name_the_cost(estimator) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ConfigurationError, match=re.escape("2^25 = 33,554,432 evaluations")) as caught:
        estimator(lambda masks: pytest.fail("evaluated"), 25)
    assert "budget" in str(caught.value)


@pytest.mark.parametrize("n", range(2, 7))
def test_leave_one_out_of_random_tables(n: int) -> None:
    table = random_table(n, seed=n)
    estimate = leave_one_out(Watched(table_game(table)), n)
    full = 2**n - 1
    torch.testing.assert_close(estimate.values, torch.stack([table[full] - table[full ^ 1 << i] for i in range(n)]))
    assert estimate.evaluations == n + 1
    assert (estimate.stderr == 0).all()


def banzhaf_reference(table: torch.Tensor) -> torch.Tensor:
    n = len(table).bit_length() - 1
    return torch.stack(
        [
            torch.stack([table[b | 1 << i] - table[b] for b in range(2**n) if not b >> i & 1]).mean(dim=0)
            for i in range(n)
        ]
    )


@pytest.mark.parametrize("n", range(1, 7))
def test_banzhaf(n: int) -> None:
    for columns in (None, 2):
        table = random_table(n, n, columns)
        estimate = banzhaf(Watched(table_game(table)), n)
        torch.testing.assert_close(estimate.values, banzhaf_reference(table))
        assert estimate.evaluations == 2**n
    additive, weights = closed_form_games(n)["additive"]
    torch.testing.assert_close(banzhaf(additive, n).values, weights)


@pytest.mark.parametrize("budget", [2, 3, 20, 60])
def test_banzhaf_is_unbiased_within_budget(budget: int) -> None:
    table = accuracy_table(6)
    runs = []
    for seed in range(200):
        utility = Watched(table_game(table))
        estimate = banzhaf(utility, 6, budget=budget, generator=rng(seed))
        assert estimate.evaluations == len(utility.seen) == budget
        runs.append(estimate)
    values = torch.stack([run.values for run in runs])
    assert ((values.mean(dim=0) - banzhaf_reference(table)).abs() <= 4 * values.std(dim=0) / 200**0.5).all()
    claimed = torch.stack([run.stderr for run in runs]).square().mean(dim=0).sqrt()
    if budget < 4:
        assert claimed.isnan().all()
    else:
        assert ((claimed / values.std(dim=0) - 1).abs() < 0.25).all()


PARAMETERS = [(1.0, 1.0), (16.0, 1.0), (4.0, 1.0), (1.0, 4.0), (0.5, 2.5)]


def beta_reference(table: torch.Tensor, alpha: float, beta: float) -> torch.Tensor:
    """Every coalition that a player can join, one by one, weighted by the paper's Beta function."""
    n = len(table).bit_length() - 1
    values = []
    for i in range(n):
        others = [j for j in range(n) if j != i]
        total = torch.zeros(table.shape[1:], dtype=torch.float64)
        for size in range(n):
            weight = special.beta(size + beta, n - 1 - size + alpha) / special.beta(alpha, beta)
            for members in itertools.combinations(others, size):
                coalition = sum(1 << j for j in members)
                total = total + weight * (table[coalition | 1 << i] - table[coalition])
        values.append(total)
    return torch.stack(values)


@pytest.mark.parametrize("n", range(1, 7))
@pytest.mark.parametrize(("alpha", "beta"), PARAMETERS)
def test_beta(n: int, alpha: float, beta: float) -> None:
    for columns in (None, 2):
        table = random_table(n, n, columns)
        estimate = beta_shapley(Watched(table_game(table)), n, alpha=alpha, beta=beta)
        torch.testing.assert_close(estimate.values, beta_reference(table, alpha, beta))
        assert estimate.evaluations == 2**n
        assert (estimate.stderr == 0).all()
    additive, weights = closed_form_games(n)["additive"]
    torch.testing.assert_close(beta_shapley(additive, n, alpha=alpha, beta=beta).values, weights)


def test_weights_are_the_integral_over_the_beta_distribution() -> None:
    # A player joins each other one's coalition with the same chance t, drawn from Beta(beta, alpha).
    for s, weight in enumerate(beta_weights(9, 4.0, 2.0)):

        def density(t: float, s: int = s) -> float:
            return special.comb(8, s) * t**s * (1 - t) ** (8 - s) * t * (1 - t) ** 3 / special.beta(2, 4)

        assert weight == pytest.approx(integrate.quad(density, 0, 1)[0], rel=1e-9)
    many = torch.tensor(beta_weights(2000, 16, 1))
    assert many.isfinite().all()
    assert many.sum().item() == pytest.approx(1)


def test_its_special_cases() -> None:
    utility = table_game(random_table(6, seed=4))
    torch.testing.assert_close(beta_shapley(utility, 6, alpha=1, beta=1).values, exact_shapley(utility, 6).values)
    loo = leave_one_out(utility, 6).values
    torch.testing.assert_close(beta_shapley(utility, 6, alpha=1, beta=1e9).values, loo, atol=1e-6, rtol=0)


@pytest.mark.parametrize(("alpha", "beta"), [(16.0, 1.0), (1.0, 4.0)])
@pytest.mark.parametrize("budget", [24, 45])
def test_beta_is_unbiased_within_budget(alpha: float, beta: float, budget: int) -> None:
    table, runs = accuracy_table(6), []
    for seed in range(200):
        utility = Watched(table_game(table))
        runs.append(beta_shapley(utility, 6, alpha=alpha, beta=beta, budget=budget, generator=rng(seed)))
        assert runs[-1].evaluations == len(utility.seen) <= budget
    values = torch.stack([run.values for run in runs])
    error = values.mean(dim=0) - beta_reference(table, alpha, beta)
    assert (error.abs() <= 4 * values.std(dim=0) / 200**0.5 + 1e-9).all()


NAN = float("nan")


def test_min_max() -> None:
    values = torch.randn(9, generator=rng(), dtype=torch.float64)
    expected = (values - values.min()) / (values.max() - values.min())
    torch.testing.assert_close(normalize_shapley(values), expected)
    torch.testing.assert_close(normalize_shapley(-7 * values + 3), 1 - expected)


def test_columns_by_themselves() -> None:
    values = torch.tensor([[1.0, 5.0], [2.0, 5.0], [NAN, 5.0], [5.0, NAN]])
    expected = torch.tensor([[0.0, 0.5], [0.25, 0.5], [NAN, 0.5], [1.0, NAN]])
    torch.testing.assert_close(normalize_shapley(values), expected, equal_nan=True)


@pytest.mark.parametrize("values", [[0.3], [0.0, 0.0], [1e9, 1e9, 1e9], [-0.2, -0.2, -0.2 * (1 + 1e-15)]])
def test_equal_values_are_one_half(values: list[float]) -> None:
    assert normalize_shapley(torch.tensor(values, dtype=torch.float64)).tolist() == [0.5] * len(values)


def test_absent_players() -> None:
    assert normalize_shapley(torch.tensor([NAN, 2.0])).nan_to_num(-1).tolist() == [-1, 0.5]
    assert normalize_shapley(torch.tensor([NAN, NAN])).isnan().all()
    assert normalize_shapley(torch.tensor([])).shape == (0,)
    assert normalize_shapley(torch.tensor([3, 1, 2])).tolist() == [1.0, 0.0, 0.5]


def test_infinite_values() -> None:
    with pytest.raises(ValueError, match=r"players \[1\] are infinite"):
        normalize_shapley(torch.tensor([1.0, float("inf")]))


def test_eq_12() -> None:
    values = torch.randn(7, generator=rng(), dtype=torch.float64)
    for k in range(7):
        differences = values[k] - values
        literal = (differences.max() - differences) / (differences.max() - differences.min())
        torch.testing.assert_close(normalize_shapley(-differences), literal)
        torch.testing.assert_close(normalize_shapley(values), literal)


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
def test_importance_is_the_optimum(m: float) -> None:
    for seed in range(20):
        weights = torch.rand(12, generator=rng(seed), dtype=torch.float64) ** 4 + 1e-6
        p = importance_probabilities(weights, m)
        np.testing.assert_allclose(p.numpy(), by_bisection(weights.numpy(), m), atol=1e-6)
        assert p.sum() == pytest.approx(m)
        assert p.min() >= 0
        assert p.max() <= 1


def test_smallest_feasible_is_best_of_the_feasible() -> None:
    for seed in range(50):
        weights = np.sort(torch.rand(8, generator=rng(seed), dtype=torch.float64).numpy() ** 5)[::-1].copy()
        ours = importance_probabilities(torch.from_numpy(weights), 4).numpy()
        feasible = [p for p in (candidate(weights, 4, certain) for certain in range(4)) if p.max() <= 1 + 1e-12]
        best = min((weights**2 / p).sum() for p in feasible)
        assert (weights**2 / ours).sum() == pytest.approx(best)


def test_importance_of_ties_and_zeros() -> None:
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


def test_errors_of_importance() -> None:
    for m in (0, -1, 4.5, float("nan")):
        with pytest.raises(ConfigurationError, match="expected_cohort"):
            importance_probabilities(torch.ones(4), m)
    for bad in (float("nan"), float("inf"), -1.0):
        with pytest.raises(ValueError, match=r"weights of clients \[2\]"):
            importance_probabilities(torch.tensor([1.0, 1.0, bad]), 1)
    with pytest.raises(ValueError, match="expected \\[n\\]"):
        importance_probabilities(torch.ones(2, 2), 1)
