"""Random orders: moments, marginals, truncation, standard errors, and when GTG-Shapley stops."""

import pytest
import torch
from functional.shapley.games import make_accuracy_table, make_random_table, make_table_game
from torch.testing import assert_close

from flsv.functional import exact_shapley, gtg_shapley, permutation_shapley
from flsv.functional.shapley.game import MemoizedGame
from flsv.functional.shapley.permutation import (
    Moments,
    _has_converged,
    marginals_along,
    random_permutations,
)
from helpers import make_generator


def test_running_mean_and_stderr_over_batches_equal_those_of_all_samples():
    count = 23
    # Far from 0, sums of squares would lose digits.
    samples = torch.randn(count, 4, 2).double() + 1e4

    moments = Moments()
    for batch in samples.split([1, 5, 1, 16]):
        moments.add(batch)

    assert moments.count == count
    assert_close(moments.mean, samples.mean(dim=0))
    assert_close(moments.stderr, samples.std(dim=0) / count**0.5)


@pytest.mark.parametrize("truncation", [None, 0.0, 0.1, 0.5])
def test_marginals_along_orders_equal_a_plain_loop_with_truncation(truncation):
    n = 6
    table = make_random_table(6)
    orders = random_permutations(50, n, make_generator())
    marginals = marginals_along(MemoizedGame(make_table_game(table), n), orders, truncation)

    for order, row in zip(orders.tolist(), marginals[..., 0], strict=True):
        expected = torch.zeros(n, dtype=torch.float64)
        coalition = 0
        value = table[0]
        for player in order:  # Ghorbani and Zou, algorithm 1
            next_value = value
            if truncation is None or abs(table[-1] - value) > truncation:
                coalition |= 1 << player
                next_value = table[coalition]
            expected[player] = next_value - value
            value = next_value
        assert_close(row, expected)


def test_permutation_stderr_is_nan_with_a_budget_of_one_pair_of_orders():
    game = make_table_game(make_random_table(3))

    for seed in range(20):
        estimate = permutation_shapley(game, 3, budget=6, generator=make_generator(seed))
        assert estimate.stderr.isnan().all()


def test_permutation_stderr_is_finite_with_a_budget_of_two_pairs_of_orders():
    game = make_table_game(make_accuracy_table(8))

    estimate = permutation_shapley(game, 8, budget=30, generator=make_generator())

    assert estimate.stderr.isfinite().all()


def test_gtg_skips_a_round_whose_gain_is_below_the_truncation():
    table = make_accuracy_table(6)
    game = make_table_game(table)
    largest = max(abs(table[-1]), abs(table[0]))
    relative_gain = float(abs(table[-1] - table[0]) / largest)

    skipped = gtg_shapley(game, 6, round_truncation=relative_gain + 1e-9)
    valued = gtg_shapley(game, 6, round_truncation=relative_gain - 1e-3, generator=make_generator())

    assert skipped.evaluations == 2  # the empty and the grand coalition
    assert (skipped.values == 0).all()
    assert skipped.stderr.isnan().all()
    assert valued.evaluations > 2


def test_within_round_truncation_saves_evaluations_and_stays_close():
    def saturate(masks):
        return 7 * (1 - 0.4 ** masks.sum(dim=1).double())

    budget = 2000  # all of which is spent without truncation
    estimate = gtg_shapley(
        saturate,
        12,
        truncation=0.05,
        convergence=None,
        budget=budget,
        generator=make_generator(),
    )

    exact = exact_shapley(saturate, 12)
    error = (estimate.values - exact.values).abs().max()
    assert error < 0.06 * 7
    assert estimate.evaluations < budget / 2


def test_gtg_convergence_stops_after_the_minimum_number_of_permutations():
    weights = torch.arange(1, 31, dtype=torch.float64)

    def add(masks):
        return masks.double() @ weights

    estimate = gtg_shapley(add, 30, generator=make_generator(), budget=10_000)

    # 30 permutations of 29 coalitions each, and the empty and the grand one.
    assert estimate.evaluations <= 2 + 30 * 29
    assert_close(estimate.values, weights)


def test_gtg_has_converged_after_30_permutations_that_agree():
    tolerance = 0.05
    # A row per permutation, the marginals of 3 players in 1 class: [permutations, 3, 1].
    equal_of_29 = torch.ones(29, 3, 1)
    equal_of_30 = torch.ones(30, 3, 1)
    signs = torch.tensor([1.0, -1.0]).repeat(20)
    alternating = signs.view(40, 1, 1).expand(40, 3, 1)

    assert not _has_converged(equal_of_29, tolerance)
    assert _has_converged(equal_of_30, tolerance)
    assert not _has_converged(alternating, tolerance)
