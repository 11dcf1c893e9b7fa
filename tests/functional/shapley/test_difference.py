"""Values from differences to a base player."""

import pytest
import torch
from functional.shapley.games import random_table, reference_shapley, rng, table_game

from flsv.functional import (
    DifferenceEstimate,
    difference_shapley,
    normalize_shapley,
)
from flsv.utilities.errors import ConfigurationError


@pytest.mark.parametrize("n", range(2, 7))
def test_normalized_shapley_from_differences_does_not_depend_on_the_base_player(n: int) -> None:
    table = random_table(n, seed=n)
    expected = normalize_shapley(torch.from_numpy(reference_shapley(table)))
    for base in range(n):
        estimate = difference_shapley(table_game(table), n, base=base)
        assert isinstance(estimate, DifferenceEstimate)
        assert estimate.base == base
        assert estimate.differences[base] == 0
        torch.testing.assert_close(normalize_shapley(-estimate.differences), expected)


def test_sampled_shapley_differences_equal_those_of_the_sampled_values() -> None:
    estimate = difference_shapley(table_game(random_table(7, columns=2)), 7, base=3, budget=60, generator=rng())
    torch.testing.assert_close(estimate.values[3] - estimate.values, estimate.differences)
    with pytest.raises(ConfigurationError, match="base=4 is not one of the players 0..3"):
        difference_shapley(table_game(random_table(4)), 4, base=4)
