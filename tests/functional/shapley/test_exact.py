"""Values by enumeration: Shapley, Banzhaf, leave-one-out."""

import itertools
import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from functional.shapley.games import Watched, accuracy_table, random_table, rng, table_game

from flsv.functional import (
    banzhaf,
    exact_shapley,
    leave_one_out,
)
from flsv.utilities.errors import ConfigurationError

#: Of a coalition of s that the player joins, of n players.
Weight = Callable[[int, int], float]


SEMIVALUES: dict[str, tuple[Any, Weight]] = {
    "shapley": (exact_shapley, lambda n, s: 1 / (n * math.comb(n - 1, s))),
    "banzhaf": (banzhaf, lambda n, s: 1 / 2 ** (n - 1)),
    "leave one out": (leave_one_out, lambda n, s: float(s == n - 1)),
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
def test_semivalues_equal_the_reference_on_random_tables(name: str, n: int) -> None:
    estimator, weight = SEMIVALUES[name]
    for columns in (None, 2):
        table = random_table(n, n, columns)
        estimate = estimator(Watched(table_game(table)), n)
        torch.testing.assert_close(estimate.values, reference(table, weight))
        assert estimate.evaluations == (n + 1 if name == "leave one out" else 2**n)
        assert (estimate.stderr == 0).all()


@pytest.mark.parametrize(("name", "budget"), [("banzhaf", 24), ("banzhaf", 45)])
def test_sampled_semivalues_are_unbiased_within_the_budget(name: str, budget: int) -> None:
    (estimator, weight), table, runs = SEMIVALUES[name], accuracy_table(6), []
    for seed in range(200):
        utility = Watched(table_game(table))
        runs.append(estimator(utility, 6, budget=budget, generator=rng(seed)))
        assert runs[-1].evaluations == len(utility.seen) <= budget
    values = torch.stack([run.values for run in runs])
    error = values.mean(dim=0) - reference(table, weight)
    assert (error.abs() <= 4 * values.std(dim=0) / 200**0.5 + 1e-9).all()
    claimed = torch.stack([run.stderr for run in runs]).square().mean(dim=0).sqrt()
    assert ((claimed / values.std(dim=0) - 1).abs() < 0.4).all()


@pytest.mark.parametrize("estimator", [exact_shapley, banzhaf])
def test_too_many_players_fail_at_once_and_name_the_cost(estimator: Any) -> None:
    with pytest.raises(ConfigurationError, match=re.escape("2^25 = 33,554,432 evaluations")):
        estimator(lambda masks: pytest.fail("evaluated"), 25)
