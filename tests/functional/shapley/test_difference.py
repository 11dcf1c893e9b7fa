"""DMC: eq. 11 to 13 and algorithm 3, as they should be and as printed."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from functional.shapley.games import random_table, reference_shapley, rng, table_game

from flsv.errors import ConfigurationError
from flsv.functional.shapley import DifferenceEstimate, difference_shapley, normalize_differences, normalize_shapley
from flsv.functional.shapley.difference import _coalitions


def eq_13(table: torch.Tensor, k: int, i: int, size: int, printed: bool) -> float:
    n = len(table).bit_length() - 1
    rest = [player for player in range(n) if player not in (k, i)]
    total = sum(
        float(table[sum(1 << p for p in (*members, k))] - table[sum(1 << p for p in (*members, i))])
        for members in itertools.combinations(rest, size)
    )
    return total / math.comb(n - 1 if printed else n - 2, size)


@pytest.mark.parametrize("n", [3, 4, 5])
def test_eq_13_divides_by_the_number_of_coalitions(n: int) -> None:
    table = random_table(n, seed=n)
    values = reference_shapley(table)
    for k, i in itertools.permutations(range(n), 2):
        corrected, printed = (
            sum(eq_13(table, k, i, size, variant) for size in range(n - 1)) / (n - 1) for variant in (False, True)
        )
        assert corrected == pytest.approx(values[k] - values[i])
        assert abs(printed - corrected) > 1e-3


def algorithm_3(table: torch.Tensor, samples: int, accumulate: bool) -> torch.Tensor:
    """Literally, for base player 0, except that i = k is skipped; ``accumulate``: += where the paper prints =."""
    n = len(table).bit_length() - 1
    generator, per_stratum = rng(), samples // (n - 1)
    strata, differences = torch.zeros(n, n - 1, dtype=torch.float64), torch.zeros(n, dtype=torch.float64)
    for _ in range(per_stratum):
        for i in range(1, n):
            for j in range(n - 1):
                rest = [player for player in range(1, n) if player != i]
                order = torch.randperm(n - 2, generator=generator)[:j].tolist()
                coalition = sum(1 << rest[position] for position in order)
                u = (table[coalition | 1] - table[coalition | 1 << i]) / per_stratum
                strata[i, j] = strata[i, j] + u if accumulate else u
    for i in range(n):
        for j in range(n - 1):
            differences[i] = differences[i] + strata[i, j] / (n - 1) if accumulate else strata[i, j] / (n - 1)
    return differences


def test_algorithm_3_must_accumulate() -> None:
    table = random_table(4, seed=5)
    values = torch.from_numpy(reference_shapley(table))
    truth = values[0] - values
    assert (algorithm_3(table, 1200, accumulate=True) - truth).abs().max() < 0.05
    printed = algorithm_3(table, 1200, accumulate=False)
    assert (printed - truth).abs().max() > 0.5 * truth.abs().max()
    assert printed.abs().max() < 0.01, "what is left of the last sample vanishes with the number of samples"


@pytest.mark.parametrize("n", range(2, 7))
def test_nsv_from_differences_does_not_depend_on_the_base(n: int) -> None:
    table = random_table(n, seed=n)
    expected = normalize_shapley(torch.from_numpy(reference_shapley(table)))
    for base in range(n):
        estimate = difference_shapley(table_game(table), n, base=base)
        assert isinstance(estimate, DifferenceEstimate)
        assert estimate.base == base
        assert estimate.differences[base] == 0
        torch.testing.assert_close(normalize_differences(estimate.differences), expected)


@pytest.mark.parametrize("base", [0, 3, 6])
def test_sampled_values_and_differences_agree(base: int) -> None:
    table = random_table(7, columns=2)
    estimate = difference_shapley(table_game(table), 7, base=base, budget=60, generator=rng())
    torch.testing.assert_close(estimate.values[base] - estimate.values, estimate.differences)
    torch.testing.assert_close(normalize_differences(estimate.differences), normalize_shapley(estimate.values))


def test_shared_coalitions_are_uniform_for_each_player() -> None:
    n, size = 6, 2
    with_base, _ = _coalitions(n, 0, torch.full((9000,), size), True, rng())
    for row in range(n - 1):
        counts = with_base[:, row].unique(dim=0, return_counts=True)[1]
        assert len(counts) == math.comb(n - 2, size)
        assert (counts - 1500).abs().max() < 4.5 * 1500**0.5


def test_base_must_be_a_player() -> None:
    with pytest.raises(ConfigurationError, match="base=4 is not one of the players 0..3"):
        difference_shapley(table_game(random_table(4)), 4, base=4)
