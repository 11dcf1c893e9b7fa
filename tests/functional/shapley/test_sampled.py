"""Sampled estimators, each against what it stands for."""

import math

import numpy as np
import pytest
import torch
from functional.shapley.games import Watched, accuracy_table, random_table, reference_shapley, rng, table_game

from flsv.functional import (
    DifferenceEstimate,
    difference_shapley,
    exact_shapley,
    gtg_shapley,
    normalize_shapley,
    permutation_shapley,
    regression_shapley,
)
from flsv.functional.confidence import t_quantile
from flsv.functional.shapley.gtg import _converged
from flsv.functional.shapley.layers import LayeredSample
from flsv.functional.shapley.memoized_game import MemoizedGame
from flsv.functional.shapley.moments import Moments
from flsv.functional.shapley.permutation import marginals_along
from flsv.functional.shapley.random_coalitions import random_permutations
from flsv.functional.shapley.stratified import stratum_means
from flsv.utilities.errors import ConfigurationError


def test_moments_of_batches_are_those_of_the_whole() -> None:
    samples = torch.randn(23, 4, 2, generator=rng(), dtype=torch.float64) + 1e4
    moments = Moments()
    for batch in samples.split([1, 5, 1, 16]):
        moments.add(batch)
    assert moments.count == 23
    torch.testing.assert_close(moments.mean, samples.mean(dim=0))
    torch.testing.assert_close(moments.stderr, samples.std(dim=0) / 23**0.5)


@pytest.mark.parametrize("n", [1, 8, 9, 64, 65])
def test_remembers_and_counts(n: int) -> None:
    weights = torch.arange(1, n + 1, dtype=torch.float64)
    utility = Watched(lambda masks: masks.double() @ weights)
    game = MemoizedGame(utility, n)
    masks = torch.rand(6, 5, n, generator=rng()) < 0.5
    distinct = len({tuple(row) for row in masks.view(-1, n).tolist()})
    assert game.cost(masks)[-1] == distinct
    for _ in range(2):
        torch.testing.assert_close(game(masks), (masks.double() @ weights).unsqueeze(-1))
        assert game.evaluations == distinct == len(utility.seen)
    assert game.cost(masks).tolist() == [0] * 6
    assert game(masks[:0]).shape == (0, 5, 1)


@pytest.mark.parametrize("n", [1, 2, 7, 8, 20])
@pytest.mark.parametrize("paired", [True, False])
@pytest.mark.parametrize("cover", [True, False])
def test_what_is_drawn(n: int, paired: bool, cover: bool) -> None:
    sample = LayeredSample(n, paired=paired, cover=cover, generator=rng())
    assert sample.capacity == (2 ** (n - 1) - 1 if paired else 2**n - 2)
    for total in {sample.minimum, min(sample.minimum + 7, sample.capacity), min(300, sample.capacity)}:
        before = [set(map(tuple, layer.masks.tolist())) for layer in sample.layers]
        sample.grow(total)
        assert sum(len(layer.masks) for layer in sample.layers) == max(total, sum(map(len, before)))
        for layer, old in zip(sample.layers, before, strict=True):
            rows = set(map(tuple, layer.masks.tolist()))
            assert len(rows) == len(layer.masks)
            assert old <= rows
            assert (layer.masks.sum(dim=1) == layer.size).all()
            if paired:
                assert not rows & set(map(tuple, (~layer.masks).tolist())), "a pair counted twice"
            if min(layer.size, n - layer.size) == 1:
                assert len(rows) == layer.capacity
            if cover and not (paired and 2 * layer.size == n):
                assert layer.masks.any(dim=0).all()
                assert (~layer.masks).any(dim=0).all()


def test_allocation_follows_the_inverse_root() -> None:
    n, sample = 40, LayeredSample(40, paired=False, generator=rng())
    sample.grow(4000)
    counts = {layer.size: len(layer.masks) for layer in sample.layers}
    for size in (5, 10, 30):
        assert counts[size] / counts[20] == pytest.approx(math.sqrt(20 * 20 / (size * (n - size))), abs=0.03)


def test_means_and_their_variance() -> None:
    members = torch.tensor([[True, True], [True, False], [True, False]])
    values = torch.tensor([[1.0], [2.0], [6.0]], dtype=torch.float64)
    mean, influences = stratum_means(members, values)
    assert mean.tolist() == [[3.0], [1.0]]
    # Player 0: the variance of a mean of three; player 1, a single draw: the deviation from the mean of all draws.
    torch.testing.assert_close(influences[:, 0].square().sum(), values.var() / 3)
    assert influences[:, 1].flatten().tolist() == [-1.5, 0.0, 0.0]


@pytest.mark.parametrize("n", range(2, 7))
def test_nsv_from_differences_does_not_depend_on_the_base(n: int) -> None:
    table = random_table(n, seed=n)
    expected = normalize_shapley(torch.from_numpy(reference_shapley(table)))
    for base in range(n):
        estimate = difference_shapley(table_game(table), n, base=base)
        assert isinstance(estimate, DifferenceEstimate)
        assert estimate.base == base
        assert estimate.differences[base] == 0
        torch.testing.assert_close(normalize_shapley(-estimate.differences), expected)


def test_sampled_values_and_differences_agree() -> None:
    estimate = difference_shapley(table_game(random_table(7, columns=2)), 7, base=3, budget=60, generator=rng())
    torch.testing.assert_close(estimate.values[3] - estimate.values, estimate.differences)
    with pytest.raises(ConfigurationError, match="base=4 is not one of the players 0..3"):
        difference_shapley(table_game(random_table(4)), 4, base=4)


@pytest.mark.parametrize("truncation", [None, 0.0, 0.1, 0.5])
def test_marginals_and_truncation(truncation: float | None) -> None:
    n, table = 6, random_table(6)
    orders = random_permutations(50, n, rng())
    marginals = marginals_along(MemoizedGame(table_game(table), n), orders, truncation)
    for order, row in zip(orders.tolist(), marginals[..., 0], strict=True):
        expected, coalition, value = torch.zeros(n, dtype=torch.float64), 0, table[0]
        for player in order:  # Ghorbani and Zou, algorithm 1
            if truncation is not None and abs(table[-1] - value) <= truncation:
                new = value
            else:
                coalition |= 1 << player
                new = table[coalition]
            expected[player] = new - value
            value = new
        torch.testing.assert_close(row, expected)


def test_standard_error_needs_two_different_pairs() -> None:
    # The budget is exactly one pair: whatever else fits is a repeat of it.
    for seed in range(20):
        estimate = permutation_shapley(table_game(random_table(3)), 3, budget=6, generator=rng(seed))
        assert estimate.stderr.isnan().all()
    assert permutation_shapley(table_game(accuracy_table(8)), 8, budget=30, generator=rng()).stderr.isfinite().all()


def test_intervals_of_few_pairs_hold_the_value_by_students_t() -> None:
    """Three pairs: 90 % intervals by the normal quantile hold two thirds, by two degrees of freedom nine tenths."""
    held, normal = [], []
    for seed in range(60):
        table = torch.randn(2**8, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        found = permutation_shapley(
            table_game(table), 8, num_permutations=6, generator=torch.Generator().manual_seed(seed)
        )
        assert found.freedom == 2
        missed = (found.values - exact_shapley(table_game(table), 8).values).abs()
        held.append((missed <= t_quantile(0.9, found.freedom) * found.stderr).double())
        normal.append((missed <= t_quantile(0.9) * found.stderr).double())
    assert 0.85 < float(torch.cat(held).mean()) < 0.95
    assert float(torch.cat(normal).mean()) < 0.78


def test_between_round_truncation() -> None:
    table = accuracy_table(6)
    gain = float((table[-1] - table[0]).abs() / max(abs(table[-1]), abs(table[0])))
    skipped = gtg_shapley(table_game(table), 6, round_truncation=gain + 1e-9)
    assert skipped.evaluations == 2
    assert (skipped.values == 0).all()
    assert skipped.stderr.isnan().all()
    assert gtg_shapley(table_game(table), 6, round_truncation=gain - 1e-3, generator=rng()).evaluations > 2


def test_within_round_truncation_saves_evaluations_and_stays_close() -> None:
    def utility(masks: torch.Tensor) -> torch.Tensor:
        return 7 * (1 - 0.4 ** masks.sum(dim=1).double())

    short = gtg_shapley(utility, 12, truncation=0.05, convergence=None, budget=2000, generator=rng())
    assert (short.values - exact_shapley(utility, 12).values).abs().max() < 7 * 0.06
    assert short.evaluations < 1000  # 2000 without


def test_convergence_stops_after_the_minimum_of_orders() -> None:
    def additive(masks: torch.Tensor) -> torch.Tensor:
        return masks.double() @ torch.arange(1, 31, dtype=torch.float64)

    estimate = gtg_shapley(additive, 30, generator=rng(), budget=10_000)
    assert estimate.evaluations <= 2 + 30 * 29
    torch.testing.assert_close(estimate.values, torch.arange(1, 31, dtype=torch.float64))
    assert not _converged(torch.ones(29, 3, 1), 0.05)
    assert _converged(torch.ones(30, 3, 1), 0.05)
    alternating = torch.tensor([1.0, -1.0]).repeat(20).view(40, 1, 1).expand(40, 3, 1)
    assert not _converged(alternating, 0.05)


def constrained_least_squares(masks: np.ndarray, gain: np.ndarray, weights: np.ndarray, total: float) -> np.ndarray:
    """KKT system of min sum w (y - z phi)^2 with sum phi = total."""
    n = masks.shape[1]
    system = np.ones((n + 1, n + 1))
    system[:n, :n] = 2 * masks.T @ (weights[:, None] * masks)
    system[n, n] = 0
    return np.linalg.solve(system, np.append(2 * masks.T @ (weights * gain), total))[:n]


@pytest.mark.parametrize("n", [7, 8])
def test_paired_form_is_the_same_problem_on_the_sample(n: int) -> None:
    table = random_table(n, seed=n)
    estimate = regression_shapley(table_game(table), n, budget=60, generator=rng(5))
    sample = LayeredSample(n, paired=True, generator=rng(5))
    sample.grow(29)
    masks, weights = [], []
    for layer in sample.layers:
        masks += [layer.masks, ~layer.masks]
        share = layer.sizes / (layer.size * (n - layer.size) * len(layer.masks))
        weights += [share] * (2 * len(layer.masks))
    coalitions = torch.cat(masks)
    gain = (MemoizedGame(table_game(table), n)(coalitions)[:, 0] - table[0]).numpy()
    solution = constrained_least_squares(
        coalitions.double().numpy(), gain, np.array(weights), float(table[-1] - table[0])
    )
    np.testing.assert_allclose(estimate.values.numpy(), solution)
