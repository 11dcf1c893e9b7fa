"""What other libraries come to for the same games: values to rounding, and errors of estimators at the same budget.

They are no dependencies: make conformance installs them in an environment of its own.
"""

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from flsv.functional import exact_shapley, knn_shapley, permutation_shapley


class Game:
    """A random game, as flsv and as shapiq ask for it."""

    def __init__(self, players: int, seed: int) -> None:
        self.n = players
        self.table = torch.randn(
            2**players, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
        )
        # Larger coalitions are worth more, as in a federation.
        num_members = [coalition.bit_count() for coalition in range(2**players)]
        sizes = torch.tensor(num_members, dtype=torch.float64)
        self.table = sizes.sqrt() + 0.3 * self.table
        self._places = 2 ** torch.arange(players)

    def utility(self, masks: Tensor) -> Tensor:
        return self.table[(masks.long() * self._places).sum(1)]

    def shapiq(self, coalitions: Any) -> Any:
        values = self.utility(
            torch.as_tensor(np.asarray(coalitions, dtype=bool).reshape(-1, self.n))
        )
        return (values - self.table[0]).numpy()


@pytest.fixture
def shapiq():
    return pytest.importorskip("shapiq", reason="make conformance installs shapiq")


def values_of_players(result: Any, players: int) -> Tensor:
    return torch.tensor(
        [float(result[(i,)]) for i in range(players)],
        dtype=torch.float64,
    )


@pytest.mark.parametrize("seed", range(3))
def test_exact_values_of_random_games_equal_those_of_shapiq(shapiq, seed):
    game = Game(6, seed)
    computer = shapiq.ExactComputer(game.shapiq, n_players=6)
    expected = values_of_players(computer("SV", order=1), 6)
    torch.testing.assert_close(exact_shapley(game.utility, 6).values, expected, rtol=0, atol=1e-9)


def squared_error(estimate: Callable[[Game, int], Tensor], draws: int = 120) -> float:
    """Mean over random games, relative to the games' own spread."""
    errors = []
    for seed in range(draws):
        game = Game(7, seed)
        exact = exact_shapley(game.utility, 7).values
        squared = (estimate(game, seed) - exact).square()
        errors.append(float(squared.mean() / exact.var()))
    return float(np.mean(errors))


BUDGET = 80


def test_sampling_error_is_at_most_that_of_shapiq_at_the_same_budget(shapiq):
    def mine(game: Game, seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        return permutation_shapley(game.utility, 7, budget=BUDGET, generator=generator).values

    def theirs(game: Game, seed: int) -> Tensor:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            sampler = shapiq.PermutationSamplingSV(n=7, random_state=seed)
            return values_of_players(sampler.approximate(budget=BUDGET, game=game.shapiq), 7)

    # Not worse by more than what differences of design come to; better is welcome.
    assert squared_error(mine) <= 1.5 * squared_error(theirs)


def test_knn_shapley_equals_that_of_pydvl():
    pytest.importorskip("pydvl", reason="make conformance installs pyDVL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from pydvl.valuation import Dataset, KNNShapleyValuation
        from sklearn.neighbors import KNeighborsClassifier

        draw = np.random.default_rng(0)
        x = draw.normal(size=(40, 3))
        y = draw.integers(0, 3, 40)
        test_x = draw.normal(size=(15, 3))
        test_y = draw.integers(0, 3, 15)
        model = KNeighborsClassifier(n_neighbors=5)
        names = [f"x{i}" for i in range(3)]
        valuation = KNNShapleyValuation(
            model=model,
            test_data=Dataset(test_x, test_y, names, ["y"]),
            progress=False,
        )
        valued = valuation.fit(Dataset(x, y, names, ["y"])).result

    expected = torch.tensor(valued.values[np.argsort(valued.indices)])
    computed = knn_shapley(
        *map(
            torch.as_tensor,
            (
                x,
                y,
                test_x,
                test_y,
            ),
        ),
        k=5,
    )

    torch.testing.assert_close(computed, expected, rtol=0, atol=1e-9)
