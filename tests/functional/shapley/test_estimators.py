"""What all estimators have in common: values, axioms, budgets, determinism, errors."""

import re
from functools import partial

import pytest
import torch
from functional.shapley.games import (
    Watched,
    make_accuracy_table,
    make_closed_form_games,
    make_generator,
    make_random_table,
    make_table_game,
    shapley_by_all_orders,
)

from flsv.functional import ESTIMATORS, ShapleyEstimate
from flsv.utilities.errors import ConfigurationError

PLAIN_GTG = partial(ESTIMATORS["gtg"], truncation=None, round_truncation=None, convergence=None)
MONTE_CARLO = partial(ESTIMATORS["permutation"], antithetic=False)
UNBIASED = {
    "permutation": ESTIMATORS["permutation"],
    "monte_carlo": MONTE_CARLO,
    "difference": ESTIMATORS["difference"],
    "gtg": PLAIN_GTG,
}
SAMPLED = {**UNBIASED, "surrogate": ESTIMATORS["surrogate"]}
ENUMERATING = [name for name in ESTIMATORS if name not in ("gtg", "leave_one_out")]


@pytest.mark.parametrize("n", range(1, 7))
@pytest.mark.parametrize("name", ENUMERATING)
def test_estimators_of_closed_form_games_are_exact(name: str, n: int) -> None:
    for game, (utility, expected) in make_closed_form_games(n).items():
        estimate = ESTIMATORS[name](utility, n)
        assert torch.allclose(estimate.values.double(), expected, atol=1e-9, rtol=1e-9), game
        assert estimate.evaluations == 2**n
        assert (estimate.stderr == 0).all()


@pytest.mark.parametrize("name", UNBIASED)
def test_sampled_values_are_unbiased(name: str) -> None:
    table = make_random_table(6, seed=16)
    draws = 200
    estimate = partial(UNBIASED[name], make_table_game(table), 6, budget=40)
    values = torch.stack([estimate(generator=make_generator(seed)).values for seed in range(draws)])
    error = values.mean(dim=0) - torch.from_numpy(shapley_by_all_orders(table))
    assert (error.abs() <= 4 * values.std(dim=0) / draws**0.5 + 1e-12).all()


@pytest.mark.slow
@pytest.mark.parametrize("name", UNBIASED)
def test_standard_error_is_within_a_quarter_of_the_spread_over_seeds(name: str) -> None:
    n = 8
    table = make_accuracy_table(8)
    runs = [
        SAMPLED[name](make_table_game(table), n, budget=180, generator=make_generator(s))
        for s in range(300)
    ]
    spread = torch.stack([run.values for run in runs]).std(dim=0)
    claimed = torch.stack([run.stderr for run in runs]).square().mean(dim=0).sqrt()

    assert ((claimed / spread - 1).abs() < 0.25).all(), claimed / spread


@pytest.mark.parametrize("name", SAMPLED)
def test_sampled_shapley_values_satisfy_efficiency_and_additivity(name: str) -> None:
    estimator = SAMPLED[name]
    a = make_random_table(7, seed=1)
    b = make_random_table(7, seed=2)

    values = []
    for table in (a, b, a + b):
        estimate = estimator(
            make_table_game(table),
            7,
            budget=60,
            generator=make_generator(),
        )
        torch.testing.assert_close(estimate.values.sum(), table[-1] - table[0])
        values.append(estimate.values)

    if name != "surrogate":  # whose kernel depends on the game
        values_of_a, values_of_b, values_of_sum = values
        torch.testing.assert_close(values_of_a + values_of_b, values_of_sum)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_value_of_one_player_is_the_whole_gain(name: str) -> None:
    for keywords in ({}, {"budget": 2}):
        estimate = ESTIMATORS[name](
            lambda masks: masks[:, 0].double() * 3 + 1, 1, generator=make_generator(), **keywords
        )
        assert estimate.values.tolist() == [3.0]
        assert estimate.evaluations == 2
        assert estimate.stderr.tolist() == [0.0]


@pytest.mark.slow
@pytest.mark.parametrize("n", [7, 40])
@pytest.mark.parametrize("name", SAMPLED)
def test_estimators_never_exceed_their_budget_of_evaluations(name: str, n: int) -> None:
    weights = torch.rand(n, generator=make_generator(), dtype=torch.float64)
    with pytest.raises(
        ConfigurationError, match=f"budget=1 is below the minimum of .* {n} players"
    ) as caught:
        SAMPLED[name](
            lambda masks: masks.double() @ weights,
            n,
            budget=1,
        )

    minimum = int(
        re.findall(
            r"minimum of (\d+)",
            str(caught.value),
        )[0]
    )
    for budget in (minimum, minimum + 1, min(2 * minimum + 5, 2**n - 1)):
        utility = Watched(lambda masks: (masks.double() @ weights).sqrt())
        estimate = SAMPLED[name](utility, n, budget=budget, generator=make_generator())
        assert estimate.evaluations == len(utility.coalitions) <= budget
        assert estimate.values.isfinite().all()
        assert estimate.values.shape == estimate.stderr.shape == (n,)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_estimators_keep_columns_and_dtypes(name: str) -> None:
    table = make_random_table(5)
    for dtype in (torch.float64, torch.float32, torch.float16, torch.int64):
        estimate = ESTIMATORS[name](
            make_table_game((table * 10).to(dtype)), 5, generator=make_generator()
        )
        assert isinstance(estimate, ShapleyEstimate)
        wanted = torch.float64 if dtype == torch.float64 else torch.float32
        assert estimate.values.dtype == estimate.stderr.dtype == wanted
        assert estimate.values.shape == estimate.stderr.shape == (5,)

    columns = ESTIMATORS[name](
        make_table_game(torch.stack([table, 2 * table], dim=1)), 5, generator=make_generator()
    )

    assert columns.values.shape == columns.stderr.shape == (5, 2)
    torch.testing.assert_close(2 * columns.values[:, 0], columns.values[:, 1])
    assert ESTIMATORS[name](
        make_table_game(table[:, None]), 5, generator=make_generator()
    ).values.shape == (5, 1)


@pytest.mark.parametrize("name", SAMPLED)
def test_estimators_draw_from_their_generator_only(name: str) -> None:
    utility = make_table_game(make_random_table(8))

    def values(seed: int) -> torch.Tensor:
        return SAMPLED[name](
            utility,
            8,
            budget=80,
            generator=make_generator(seed),
        ).values

    state = torch.get_rng_state()
    assert torch.equal(values(1), values(1))
    assert not torch.equal(values(1), values(2))
    assert torch.equal(torch.get_rng_state(), state), "touched the global generator"


@pytest.mark.parametrize("bad", [float("nan"), float("-inf")])
@pytest.mark.parametrize("name", ESTIMATORS)
def test_non_finite_utility_raises_an_error_that_names_the_coalition(name: str, bad: float) -> None:
    columns = make_random_table(4, columns=2)
    columns[0b1111, 1] = bad
    with pytest.raises(ValueError, match=re.escape("coalition [0, 1, 2, 3] is [")):
        ESTIMATORS[name](make_table_game(columns), 4, generator=make_generator())


@pytest.mark.parametrize("name", ESTIMATORS)
def test_estimators_with_wrong_arguments_raise(name: str) -> None:
    with pytest.raises(ConfigurationError, match="at least 1 player"):
        ESTIMATORS[name](lambda masks: masks.sum(dim=1), 0)
    with pytest.raises(ConfigurationError, match="minimum of"):
        ESTIMATORS[name](lambda masks: masks.sum(dim=1), 5, budget=1)
    with pytest.raises(ConfigurationError, match=r"budget=nan\): expected a whole number or None"):
        ESTIMATORS[name](lambda masks: masks.sum(dim=1), 5, budget=float("nan"))
    with pytest.raises(ValueError, match=re.escape("returned shape ()")):
        ESTIMATORS[name](lambda masks: torch.tensor(1.0), 5)
