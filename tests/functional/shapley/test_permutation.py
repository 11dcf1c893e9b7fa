"""Random orders: marginals, truncation, standard errors."""

import pytest
import torch
from functional.shapley.games import accuracy_table, random_table, rng, table_game

from flsv.functional import (
    exact_shapley,
    permutation_shapley,
)
from flsv.functional.confidence import t_quantile
from flsv.functional.shapley.game import MemoizedGame
from flsv.functional.shapley.permutation import marginals_along, random_permutations


@pytest.mark.parametrize("truncation", [None, 0.0, 0.1, 0.5])
def test_marginals_along_orders_equal_a_plain_loop_with_truncation(truncation: float | None) -> None:
    n, table = 6, random_table(6)
    orders = random_permutations(50, n, rng())
    marginals = marginals_along(MemoizedGame(table_game(table), n), orders, truncation)
    for order, row in zip(orders.tolist(), marginals[..., 0], strict=True):
        expected, coalition, value = torch.zeros(n, dtype=torch.float64), 0, table[0]
        for player in order:  # Ghorbani and Zou, algorithm 1
            if truncation is not None and abs(table[-1] - value) <= truncation:
                new = value
            else:
                coalition |= 1 << player
                new = table[coalition]
            expected[player] = new - value
            value = new
        torch.testing.assert_close(row, expected)


def test_permutation_stderr_is_nan_without_two_different_pairs_of_orders() -> None:
    # The budget is exactly one pair: whatever else fits is a repeat of it.
    for seed in range(20):
        estimate = permutation_shapley(table_game(random_table(3)), 3, budget=6, generator=rng(seed))
        assert estimate.stderr.isnan().all()
    assert permutation_shapley(table_game(accuracy_table(8)), 8, budget=30, generator=rng()).stderr.isfinite().all()


def test_permutation_intervals_of_three_pairs_hold_the_value_by_students_t() -> None:
    """Three pairs: 90 % intervals by the normal quantile hold two thirds, by two degrees of freedom nine tenths."""
    held, normal = [], []
    for seed in range(60):
        table = torch.randn(2**8, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        found = permutation_shapley(
            table_game(table), 8, num_permutations=6, generator=torch.Generator().manual_seed(seed)
        )
        assert found.freedom == 2
        missed = (found.values - exact_shapley(table_game(table), 8).values).abs()
        held.append((missed <= t_quantile(0.9, found.freedom) * found.stderr).double())
        normal.append((missed <= t_quantile(0.9) * found.stderr).double())
    assert 0.85 < float(torch.cat(held).mean()) < 0.95
    assert float(torch.cat(normal).mean()) < 0.78
