"""What all estimators have in common: values, axioms, budgets, determinism, errors."""

import re
from functools import partial

import pytest
import torch
from functional.shapley.games import (
    Watched,
    make_accuracy_table,
    make_closed_form_games,
    make_random_table,
    make_table_game,
    shapley_by_all_orders,
)
from torch.testing import assert_close

from flsv.functional import ESTIMATORS
from helpers import make_generator, refused

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


@pytest.mark.parametrize("n", [1, 2, 3, 6])
@pytest.mark.parametrize("name", ENUMERATING)
def test_estimators_of_closed_form_games_are_exact(name, n):
    for game, (utility, expected) in make_closed_form_games(n).items():
        estimate = ESTIMATORS[name](utility, n)
        assert torch.allclose(
            estimate.values.double(),
            expected,
            atol=1e-9,
            rtol=1e-9,
        ), game
        assert estimate.evaluations == 2**n
        assert (estimate.stderr == 0).all()


@pytest.mark.by_turn
@pytest.mark.fast_rows
@pytest.mark.parametrize("name", UNBIASED)
def test_sampled_values_are_unbiased(name):
    num_draws = 200
    table = make_random_table(6, seed=16)
    exact = torch.from_numpy(shapley_by_all_orders(table))
    estimate = partial(
        UNBIASED[name],
        make_table_game(table),
        6,
        budget=40,
    )

    draws = [estimate(generator=make_generator(seed)).values for seed in range(num_draws)]

    values = torch.stack(draws)
    error = (values.mean(dim=0) - exact).abs()
    stderr_of_mean = values.std(dim=0) / num_draws**0.5
    assert (error <= 4 * stderr_of_mean + 1e-12).all()


@pytest.mark.by_turn
@pytest.mark.slow
@pytest.mark.parametrize("name", SAMPLED)
def test_standard_error_is_near_the_spread_over_seeds(name):
    n = 8
    game = make_table_game(make_accuracy_table(n))

    values = []
    variances = []
    for seed in range(150):
        estimate = SAMPLED[name](
            game,
            n,
            budget=180,
            generator=make_generator(seed),
        )
        values.append(estimate.values)
        variances.append(estimate.stderr.square())

    spread = torch.stack(values).std(dim=0)
    stderr = torch.stack(variances).mean(dim=0).sqrt()
    ratio = stderr / spread
    assert (ratio > 0.7).all(), ratio
    assert (ratio < 1.5).all(), ratio


def sampled_values(name, table):
    game = make_table_game(table)
    return SAMPLED[name](
        game,
        7,
        budget=60,
        generator=make_generator(),
    ).values


@pytest.mark.parametrize("name", SAMPLED)
def test_sampled_values_sum_to_the_gain(name):
    table = make_random_table(7, seed=1)

    assert_close(
        sampled_values(name, table).sum(),
        table[-1] - table[0],
    )


@pytest.mark.parametrize("name", UNBIASED)
def test_sampled_values_of_a_sum_of_games_are_the_sums_of_their_values(name):
    table_a = make_random_table(7, seed=1)
    table_b = make_random_table(7, seed=2)

    values = sampled_values(name, table_a + table_b)

    assert_close(values, sampled_values(name, table_a) + sampled_values(name, table_b))


@pytest.mark.parametrize("options", [{}, {"budget": 2}])
@pytest.mark.parametrize("name", ESTIMATORS)
def test_value_of_one_player_is_the_whole_gain(name, options):
    def utility(masks):
        return masks[:, 0].double() * 3 + 1

    estimate = ESTIMATORS[name](
        utility,
        1,
        generator=make_generator(),
        **options,
    )

    assert estimate.values.tolist() == [3.0]
    assert estimate.evaluations == 2
    assert estimate.stderr.tolist() == [0.0]


@pytest.mark.by_turn
@pytest.mark.slow
@pytest.mark.parametrize("n", [7, 40])
@pytest.mark.parametrize("name", SAMPLED)
def test_estimators_never_exceed_their_budget_of_evaluations(name, n):
    weights = torch.rand(n).double()

    def root_of_sum(masks):
        return (masks.double() @ weights).sqrt()

    with refused(f"budget=1 is below.*{n} players") as refusal:
        SAMPLED[name](root_of_sum, n, budget=1)

    (minimum,) = re.findall(r"minimum of (\d+)", str(refusal.value))
    smallest = int(minimum)
    middle = min(2 * smallest + 5, 2**n - 1)
    for budget in (smallest, smallest + 1, middle):
        utility = Watched(root_of_sum)
        estimate = SAMPLED[name](
            utility,
            n,
            budget=budget,
            generator=make_generator(),
        )
        assert estimate.evaluations == len(utility.coalitions)
        assert estimate.evaluations <= budget
        assert estimate.values.isfinite().all()
        assert estimate.values.shape == (n,)
        assert estimate.stderr.shape == (n,)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_estimators_value_each_column_by_itself_and_half_precision_in_float32(name):
    table = make_random_table(5).half()
    two_columns = torch.stack([table, 2 * table], dim=1)
    one_column = table[:, None]

    of_two = ESTIMATORS[name](
        make_table_game(two_columns),
        5,
        generator=make_generator(),
    )
    of_one = ESTIMATORS[name](
        make_table_game(one_column),
        5,
        generator=make_generator(),
    )

    assert of_two.values.shape == of_two.stderr.shape == (5, 2)
    assert of_two.values.dtype == of_two.stderr.dtype == torch.float32
    assert_close(
        2 * of_two.values[:, 0],
        of_two.values[:, 1],
    )
    assert of_one.values.shape == (5, 1)


@pytest.mark.parametrize("name", SAMPLED)
def test_estimators_draw_from_their_generator_only(name):
    utility = make_table_game(make_random_table(8))

    def values(seed):
        return SAMPLED[name](utility, 8, budget=80, generator=make_generator(seed)).values

    global_state = torch.get_rng_state()
    assert torch.equal(values(1), values(1))
    assert not torch.equal(values(1), values(2))
    assert torch.equal(torch.get_rng_state(), global_state)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_non_finite_utility_raises_an_error_that_names_the_coalition(name):
    columns = make_random_table(4, columns=2)
    columns[0b1111, 1] = torch.nan
    with pytest.raises(ValueError, match=re.escape("coalition [0, 1, 2, 3] is [")):
        ESTIMATORS[name](make_table_game(columns), 4, generator=make_generator())


@pytest.mark.parametrize(
    ("num_players", "options", "message"),
    [
        (0, {}, "at least 1 player"),
        (5, {"budget": 1}, "minimum of"),
        (5, {"budget": float("nan")}, r"budget=nan\): expected.*number or None"),
    ],
)
@pytest.mark.parametrize("name", ESTIMATORS)
def test_estimators_with_wrong_arguments_are_refused(name, num_players, options, message):
    with refused(message):
        ESTIMATORS[name](lambda masks: masks.sum(dim=1), num_players, **options)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_estimators_of_a_game_that_returns_one_number_raise(name):
    with pytest.raises(ValueError, match=re.escape("returned shape ()")):
        ESTIMATORS[name](lambda masks: torch.tensor(1.0), 5)
