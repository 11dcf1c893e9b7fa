"""The Shapley value as a mean of complementary contributions, by enumeration."""

from __future__ import annotations

import pytest
import torch
from functional.shapley.games import random_table, reference_shapley


@pytest.mark.parametrize("n", range(1, 7))
def test_formula(n: int) -> None:
    table = random_table(n, seed=n)
    expected = torch.zeros(n, dtype=torch.float64)
    for i in range(n):
        for size in range(1, n + 1):
            inside = [b for b in range(2**n) if b >> i & 1 and b.bit_count() == size]
            expected[i] += sum(table[b] - table[2**n - 1 - b] for b in inside) / len(inside) / n
    torch.testing.assert_close(expected, torch.from_numpy(reference_shapley(table)))
