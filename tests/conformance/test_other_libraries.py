"""What other libraries come to for the same games: values to rounding, and errors of estimators at the same budget.

They are no dependencies: make conformance installs them in an environment of its own.
"""

import numpy as np
import pytest
import torch

from flsv.functional import exact_shapley
from helpers import make_generator


class Game:
    """A random game, as flsv and as shapiq ask for it."""

    def __init__(self, players, seed):
        self.n = players
        generator = make_generator(seed)
        noise = torch.randn(
            2**players,
            generator=generator,
            dtype=torch.float64,
        )
        # Larger coalitions are worth more, as in a federation.
        num_members = [coalition.bit_count() for coalition in range(2**players)]
        sizes = torch.tensor(num_members, dtype=torch.float64)
        self.table = sizes.sqrt() + 0.3 * noise
        self._places = 2 ** torch.arange(players)

    def utility(self, masks):
        numbers = (masks.long() * self._places).sum(1)
        return self.table[numbers]

    def shapiq(self, coalitions):
        masks = np.asarray(coalitions, dtype=bool)
        rows = masks.reshape(-1, self.n)
        values = self.utility(torch.as_tensor(rows))
        return (values - self.table[0]).numpy()


@pytest.fixture
def shapiq():
    return pytest.importorskip("shapiq", reason="make conformance installs shapiq")


def values_of_players(result, players):
    values = []
    for player in range(players):
        value = result[(player,)]
        values.append(float(value))
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize("seed", range(3))
def test_exact_values_of_random_games_equal_those_of_shapiq(shapiq, seed):
    game = Game(6, seed)
    computer = shapiq.ExactComputer(game.shapiq, n_players=6)
    expected = values_of_players(computer("SV", order=1), 6)
    exact = exact_shapley(game.utility, 6)
    torch.testing.assert_close(
        exact.values,
        expected,
        rtol=0,
        atol=1e-9,
    )
