"""What a memoized game remembers and counts."""

import pytest
import torch
from functional.shapley.games import Watched

from flsv.functional.shapley.game import MemoizedGame
from helpers import make_generator


@pytest.mark.parametrize("n", [1, 8, 9, 64, 65])
def test_memoized_game_evaluates_each_coalition_once_and_counts_it(n):
    weights = torch.arange(1, n + 1, dtype=torch.float64)
    utility = Watched(lambda masks: masks.double() @ weights)
    game = MemoizedGame(utility, n)
    masks = (
        torch.rand(
            6,
            5,
            n,
            generator=make_generator(),
        )
        < 0.5
    )
    expected = (masks.double() @ weights).unsqueeze(-1)
    num_coalitions = len(masks.view(-1, n).unique(dim=0))

    assert game.cumulative_cost(masks)[-1] == num_coalitions

    for _ in range(2):
        torch.testing.assert_close(game(masks), expected)
        assert game.evaluations == num_coalitions
        assert len(utility.coalitions) == num_coalitions

    assert game.cumulative_cost(masks).tolist() == [0] * 6
    assert game(masks[:0]).shape == (0, 5, 1)
