"""The Banzhaf value, exact and by maximum sample reuse."""

from __future__ import annotations

import pytest
import torch
from functional.shapley.games import Watched, accuracy_table, closed_form_games, random_table, rng, table_game

from flsv.functional.shapley import banzhaf


def reference(table: torch.Tensor) -> torch.Tensor:
    n = len(table).bit_length() - 1
    return torch.stack(
        [
            torch.stack([table[b | 1 << i] - table[b] for b in range(2**n) if not b >> i & 1]).mean(dim=0)
            for i in range(n)
        ]
    )


@pytest.mark.parametrize("n", range(1, 7))
def test_exact(n: int) -> None:
    for columns in (None, 2):
        table = random_table(n, n, columns)
        estimate = banzhaf(Watched(table_game(table)), n)
        torch.testing.assert_close(estimate.values, reference(table))
        assert estimate.evaluations == 2**n
    additive, weights = closed_form_games(n)["additive"]
    torch.testing.assert_close(banzhaf(additive, n).values, weights)


def test_majority_in_closed_form() -> None:
    # Pivotal with probability binom(4, 2) / 2^4 among 5 players.
    values = banzhaf(lambda masks: (masks.sum(dim=1) >= 3).double(), 5).values
    torch.testing.assert_close(values, torch.full((5,), 6 / 16, dtype=torch.float64))


@pytest.mark.parametrize("budget", [2, 3, 20, 60])
def test_unbiased_within_budget(budget: int) -> None:
    table = accuracy_table(6)
    runs = []
    for seed in range(200):
        utility = Watched(table_game(table))
        estimate = banzhaf(utility, 6, budget=budget, generator=rng(seed))
        assert estimate.evaluations == len(utility.seen) == budget
        runs.append(estimate)
    values = torch.stack([run.values for run in runs])
    assert ((values.mean(dim=0) - reference(table)).abs() <= 4 * values.std(dim=0) / 200**0.5).all()
    claimed = torch.stack([run.stderr for run in runs]).square().mean(dim=0).sqrt()
    if budget < 4:
        assert claimed.isnan().all()
    else:
        assert ((claimed / values.std(dim=0) - 1).abs() < 0.25).all()


def test_a_target_beyond_all_coalitions_ends_with_the_exact_value() -> None:
    game = Watched(lambda masks: masks.sum(dim=1).double() ** 2)
    found = banzhaf(game, 3, budget=30, target_stderr=1e-9)
    assert found.values.tolist() == [3.0, 3.0, 3.0]
    assert found.evaluations == 8
