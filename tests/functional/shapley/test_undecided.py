"""When no pair is told apart, and how many evaluations do tell one apart then."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.stats import studentized_range

from flsv.functional.shapley import ShapleyEstimate, permutation_shapley
from flsv.functional.shapley.undecided import times_to_tell_apart, told_apart


def test_a_pair_is_told_apart_as_by_hand() -> None:
    draw = np.random.default_rng(0)
    for _ in range(30):
        values, errors = draw.normal(size=7) * 3, draw.uniform(0.5, 1.5, 7)
        far = studentized_range.ppf(0.95, 7, np.inf)
        least = np.maximum(errors, np.sqrt((errors**2).mean()))
        expected = any(
            abs(values[i] - values[j]) / np.sqrt((least[i] ** 2 + least[j] ** 2) / 2) > far
            for i in range(7)
            for j in range(i)
        )
        assert told_apart(torch.from_numpy(values), torch.from_numpy(errors)) == expected


def test_of_equal_values_one_in_twenty_is() -> None:
    draw = torch.Generator().manual_seed(0)
    found = [told_apart(torch.randn(10, generator=draw), torch.ones(10)) for _ in range(1500)]
    assert 0.03 < sum(found) / len(found) < 0.07


def test_errors_of_few_samples_tell_less_apart() -> None:
    draw = torch.Generator().manual_seed(1)
    samples = torch.randn(1500, 5, 8, generator=draw)
    means, errors = samples.mean(1), samples.std(1) / 5**0.5
    found = [[told_apart(m, e, freedom) for m, e in zip(means, errors)] for freedom in (4, float("inf"))]
    few, many = (sum(each) / len(each) for each in found)
    assert few < 0.07
    assert many > 2 * few


@pytest.mark.slow
def test_of_errors_that_are_poorly_known_it_takes_more() -> None:
    values, errors = torch.arange(6.0), torch.full((6,), 1.6)
    times = [times_to_tell_apart(values, errors, freedom) for freedom in (1, 3, 30, float("inf"))]
    assert times == sorted(times, reverse=True)
    assert times[0] > 2 * times[-1]
    assert times_to_tell_apart(values, errors, 2000) == times[-1]


def test_what_is_not_known_is_left_out() -> None:
    nan = float("nan")
    values, errors = torch.tensor([0.0, 9.0, nan, 0.1]), torch.tensor([0.1, nan, 0.1, 0.1])
    assert not told_apart(values, errors)
    assert not told_apart(values[:1], errors[:1])
    assert times_to_tell_apart(values, errors) == times_to_tell_apart(values[[0, 3]], errors[[0, 3]])


@pytest.mark.parametrize("clients", [6, 20, 50])
@pytest.mark.parametrize("shape", ["normal", "uniform", "one apart"])
def test_so_many_evaluations_tell_a_pair_apart_in_half_of_all_cases(clients: int, shape: str) -> None:
    """True values that spread by a third of their error up to its double; looked at only where nobody is told apart."""
    draw = torch.Generator().manual_seed(clients)
    hits = []
    while len(hits) < 150:
        true = torch.randn(clients, generator=draw)
        if shape == "uniform":
            true = 3.46 * (torch.rand(clients, generator=draw) - 0.5)
        elif shape == "one apart":
            true = 0.3 * true
            true[0] -= 3
        true *= 1 / 3 + 5 / 3 * torch.rand((), generator=draw)
        values, errors = true + torch.randn(clients, generator=draw), torch.ones(clients)
        if told_apart(values, errors):
            continue
        smaller = errors / times_to_tell_apart(values, errors) ** 0.5
        hits.append(told_apart(true + smaller * torch.randn(clients, generator=draw), smaller))
    assert 0.4 < sum(hits) / len(hits) < 0.85


@pytest.mark.slow
def test_a_sampled_game_is_told_apart_at_the_budget_that_is_named() -> None:
    """Twenty players of nearly the same worth, and interactions that make their estimates noisy."""
    worth, phases = torch.randn(2, 20, generator=torch.Generator().manual_seed(3), dtype=torch.float64)

    def game(masks: torch.Tensor) -> torch.Tensor:
        return masks.double() @ (1 + 0.03 * worth) + torch.sin(50 * (masks.double() @ phases))

    def apart(each: ShapleyEstimate) -> bool:
        return told_apart(each.values, each.stderr, float(torch.as_tensor(each.freedom).min()))

    def played(budget: int, seed: int) -> ShapleyEstimate:
        return permutation_shapley(game, 20, budget=budget, generator=torch.Generator().manual_seed(seed))

    undecided = [each for each in (played(900, seed) for seed in range(20)) if not apart(each)]
    assert len(undecided) >= 6
    hits = []
    for seed, each in enumerate(undecided):
        times = times_to_tell_apart(each.values, each.stderr, float(torch.as_tensor(each.freedom).min()))
        more = played(int(each.evaluations * times), 100 + seed)
        torch.testing.assert_close(more.stderr.mean(), each.stderr.mean() / times**0.5, rtol=0.25, atol=0)
        hits.append(apart(more))
    assert len(hits) / 4 <= sum(hits)
