"""Enumeration, against the mean over all orders; the misprint in definition 4.1."""

from __future__ import annotations

import itertools
import math
import re

import pytest
import torch
from functional.shapley.games import Watched, random_table, reference_shapley, table_game

from flsv.errors import ConfigurationError
from flsv.functional.shapley import banzhaf, exact_shapley


@pytest.mark.parametrize("n", range(1, 7))
def test_random_tables(n: int) -> None:
    for seed, columns in itertools.product(range(3), (None, 3)):
        table = random_table(n, seed, columns)
        estimate = exact_shapley(Watched(table_game(table)), n)
        torch.testing.assert_close(estimate.values, torch.from_numpy(reference_shapley(table)))


def definition_4_1(table: torch.Tensor, second_line: bool) -> torch.Tensor:
    n = len(table).bit_length() - 1
    values = torch.zeros(n, dtype=torch.float64)
    for i in range(n):
        for coalition in range(2**n):
            if not coalition >> i & 1:
                size = coalition.bit_count()
                count = math.comb(n if second_line else n - 1, size)
                values[i] += (table[coalition | 1 << i] - table[coalition]) / (n * count)
    return values


@pytest.mark.parametrize("n", range(2, 7))
def test_definition_4_1_second_line_is_a_misprint(n: int) -> None:
    table = random_table(n, seed=n)
    values = exact_shapley(table_game(table), n).values
    torch.testing.assert_close(values, definition_4_1(table, second_line=False))
    printed = definition_4_1(table, second_line=True)
    assert (values - printed).abs().max() > 0.01
    assert abs(printed.sum() - (table[-1] - table[0])) > 0.01, "the printed weights would be efficient"


@pytest.mark.parametrize("estimator", [exact_shapley, banzhaf])
def test_too_many_players_fail_at_once_and_name_the_cost(estimator) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ConfigurationError, match=re.escape("2^25 = 33,554,432 evaluations")) as caught:
        estimator(lambda masks: pytest.fail("evaluated"), 25)
    assert "budget" in str(caught.value)
