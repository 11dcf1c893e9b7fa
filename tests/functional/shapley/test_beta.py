"""Beta Shapley, exact and sampled."""

from __future__ import annotations

import itertools

import pytest
import torch
from functional.shapley.games import Watched, accuracy_table, closed_form_games, random_table, rng, table_game
from scipy import integrate, special

from flsv.functional.shapley import beta_shapley, exact_shapley, leave_one_out
from flsv.functional.shapley.other_values import beta_weights

PARAMETERS = [(1.0, 1.0), (16.0, 1.0), (4.0, 1.0), (1.0, 4.0), (0.5, 2.5)]


def reference(table: torch.Tensor, alpha: float, beta: float) -> torch.Tensor:
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
def test_exact(n: int, alpha: float, beta: float) -> None:
    for columns in (None, 2):
        table = random_table(n, n, columns)
        estimate = beta_shapley(Watched(table_game(table)), n, alpha=alpha, beta=beta)
        torch.testing.assert_close(estimate.values, reference(table, alpha, beta))
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
def test_unbiased_within_budget(alpha: float, beta: float, budget: int) -> None:
    table, runs = accuracy_table(6), []
    for seed in range(200):
        utility = Watched(table_game(table))
        runs.append(beta_shapley(utility, 6, alpha=alpha, beta=beta, budget=budget, generator=rng(seed)))
        assert runs[-1].evaluations == len(utility.seen) <= budget
    values = torch.stack([run.values for run in runs])
    error = values.mean(dim=0) - reference(table, alpha, beta)
    assert (error.abs() <= 4 * values.std(dim=0) / 200**0.5 + 1e-9).all()


@pytest.mark.slow
def test_standard_error_is_within_a_quarter_of_the_spread() -> None:
    table = accuracy_table(8)
    runs = [beta_shapley(table_game(table), 8, alpha=4, budget=150, generator=rng(s)) for s in range(300)]
    spread = torch.stack([run.values for run in runs]).std(dim=0)
    claimed = torch.stack([run.stderr for run in runs]).square().mean(dim=0).sqrt()
    assert ((claimed / spread - 1).abs() < 0.25).all(), claimed / spread


@pytest.mark.parametrize(("alpha", "beta"), [(2.0, 1.0), (1.0, 1.0), (1.0, 3.0)])
def test_draws_each_size_as_often_as_minimizes_the_variance(alpha: float, beta: float) -> None:
    """Of m coalitions of size s, m s/n have a player and m (n - s)/n do not; if utilities spread equally, the sum of
    spread(s)^2 / m(s) at a given sum of m(s) is least for m in proportion to spread."""
    n = 20
    utility = Watched(lambda masks: masks.sum(dim=1).double())
    beta_shapley(utility, n, alpha=alpha, beta=beta, budget=4000, generator=rng())
    drawn = torch.tensor([sum(mask) for mask in utility.seen]).bincount(minlength=n + 1).tolist()
    ways = [special.comb(n - 1, s) * special.beta(s + beta, n - 1 - s + alpha) for s in range(n)]
    weights = [way / special.beta(alpha, beta) for way in ways]
    free = [s for s in range(2, n - 1) if 20 < drawn[s] < special.comb(n, s)]
    assert len(free) > 10
    spread = {s: (weights[s - 1] ** 2 * n / s + weights[s] ** 2 * n / (n - s)) ** 0.5 for s in free}
    for s in free:
        assert drawn[s] == pytest.approx(spread[s] * sum(drawn[f] for f in free) / sum(spread.values()), abs=1.5)
