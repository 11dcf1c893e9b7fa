"""Values from the sizes that are complete, beside a walk over all coalitions in plain Python."""

import math
from itertools import combinations

import numpy as np
import pytest
import torch
from functional.shapley.games import random_table, reference_shapley, table_game
from torch import Tensor

from flsv.functional import few_coalitions
from flsv.functional.shapley.few_coalitions import Which
from flsv.functional.shapley.size_effects import size_effects, size_effects_shapley


def worth(members: tuple[int, ...]) -> float:
    return math.sin(1 + sum(3.0**-i for i in members)) + 0.1 * len(members)


def utilities_of(masks: Tensor) -> Tensor:
    return torch.tensor([[worth(tuple(mask.nonzero().flatten().tolist()))] for mask in masks], dtype=torch.float64)


def effect(player: int, size: int, n: int) -> float:
    """The mean with a player minus that without it, of all coalitions of a size."""
    sides: dict[bool, list[float]] = {True: [], False: []}
    for members in combinations(range(n), size):
        sides[player in members].append(worth(members))
    return float(np.mean(sides[True]) - np.mean(sides[False]))


@pytest.mark.parametrize(("which", "known"), [("both", [1, 5]), ("pairs+leave-one-out", [1, 2, 5])])
def test_size_effects_are_interpolated_linearly_in_the_logarithm_of_the_size(which: Which, known: list[int]) -> None:
    n, masks = 6, few_coalitions(6, which)
    every = [[effect(player, size, n) for size in known] for player in range(n)]
    drawn = [np.interp(np.log(range(1, n)), np.log(known), of_player).sum() for of_player in every]
    expected = (worth(tuple(range(n))) - worth(()) + np.array(drawn)) / n
    found = size_effects_shapley(masks, utilities_of(masks))
    assert found is not None
    np.testing.assert_allclose(found.flatten().numpy(), expected, atol=1e-12)


@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_size_effects_of_all_coalitions_are_exact(n: int) -> None:
    table, masks = random_table(n, 1), few_coalitions(n, "all")
    found = size_effects_shapley(masks, table_game(table)(masks)[:, None])
    assert found is not None
    np.testing.assert_allclose(found.flatten().numpy(), reference_shapley(table), atol=1e-12)


def test_size_effects_ignore_a_coalition_size_that_is_incomplete() -> None:
    masks = few_coalitions(6, "pairs+leave-one-out")
    some = masks[masks.sum(1) != 2], masks[torch.arange(len(masks)) != 8]
    assert masks[8].sum() == 2
    whole, less = (size_effects_shapley(each, utilities_of(each)) for each in some)
    assert whole is not None
    assert less is not None
    torch.testing.assert_close(less, whole)
    assert list(size_effects(some[1], utilities_of(some[1]))) == [1, 5]


@pytest.mark.parametrize("which", ["singles", "pairs", "leave-one-out"])
def test_size_effects_without_the_smallest_or_largest_size_are_none(which: Which) -> None:
    masks = few_coalitions(5, which)
    assert size_effects_shapley(masks, utilities_of(masks)) is None
