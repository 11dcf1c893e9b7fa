"""Orders along circles: each place equally often, unbiased on exact tables, and cheaper than orders drawn alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from flsv.benchmark import federation, truth_table
from flsv.benchmark.truth import arcs, values_by_circles
from flsv.functional.shapley.game import MemoizedGame, all_coalitions, shapley_of_table
from flsv.functional.shapley.layers import random_permutations
from flsv.functional.shapley.permutation import marginals_along

SHIPPED = ["digits_label_noise", "digits_sizes", "digits_free_riders", "fashion_duplicates", "clinics"]


def shipped(name: str) -> tuple[MemoizedGame, int, Tensor]:
    """The game of a table's first seed, its players and its exact values."""
    truth = truth_table(federation(name))
    assert truth.utilities is not None
    table, players = truth.utilities[0], truth.num_clients
    game = MemoizedGame(lambda masks: table[(masks * 2 ** torch.arange(players)).sum(1)], players)
    return game, players, truth.values[0]


def test_the_arcs_are_all_that_is_asked_for_and_more_circles_add_to_them() -> None:
    asked: set[tuple[bool, ...]] = set()

    def utility(masks: Tensor) -> Tensor:
        asked.update(map(tuple, masks.tolist()))
        return masks.sum(1).double()

    values = values_by_circles(MemoizedGame(utility, 8), 8, seed=5, circles=2)
    torch.testing.assert_close(values, torch.ones(2, 8, dtype=torch.float64))
    found = [tuple(mask) for mask in arcs(8, seed=5, circles=2).tolist()]
    assert set(found) == asked
    assert len(found) == len(asked)
    assert arcs(8, 5, 1).tolist() == [list(mask) for mask in found][: len(arcs(8, 5, 1))]
    assert len(arcs(8, 5, 1)) == 8 * 7 + 2


def test_of_three_players_one_circle_is_exact() -> None:
    table = torch.randn(8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    game = MemoizedGame(lambda masks: table[(masks * torch.tensor([1, 2, 4])).sum(1)], 3)
    assert sorted(map(tuple, arcs(3, 0, 1).tolist())) == sorted(map(tuple, all_coalitions(3).tolist()))
    torch.testing.assert_close(values_by_circles(game, 3, 0, 1)[0], shapley_of_table(table[:, None])[:, 0])


@pytest.mark.parametrize("name", SHIPPED)
def test_circles_come_to_the_exact_values_and_vary_less_than_pairs_of_orders(name: str) -> None:
    game, players, exact = shipped(name)
    circles = values_by_circles(game, players, seed=0, circles=400)
    stderr = circles.std(0) / 400**0.5
    assert ((circles.mean(0) - exact).abs() <= 4 * stderr + 1e-12).all()
    torch.testing.assert_close(circles.sum(1), exact.sum().expand(400))
    orders = random_permutations(400, players, torch.Generator().manual_seed(0))
    both = marginals_along(game, torch.stack([orders, orders.flip(1)], 1).flatten(0, 1)).squeeze(-1)
    pairs = both.view(400, 2, players).mean(1)
    # For as many coalitions: a pair has 2 (n - 1), a circle n (n - 1).
    assert players * circles.var(0).sum() < 0.3 * 2 * pairs.var(0).sum()
