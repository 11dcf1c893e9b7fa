"""Leave-one-out."""

from __future__ import annotations

import pytest
import torch
from functional.shapley.games import Watched, random_table, table_game

from flsv.functional.shapley import leave_one_out


@pytest.mark.parametrize("n", range(2, 7))
def test_random_tables(n: int) -> None:
    table = random_table(n, seed=n)
    estimate = leave_one_out(Watched(table_game(table)), n)
    full = 2**n - 1
    torch.testing.assert_close(estimate.values, torch.stack([table[full] - table[full ^ 1 << i] for i in range(n)]))
    assert estimate.evaluations == n + 1
    assert (estimate.stderr == 0).all()
