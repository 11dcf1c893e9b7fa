"""What values become over rounds: moving averages, bounds, decayed sums, and their spread."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats

from flsv.functional import lower_bound
from flsv.functional.over_rounds import (
    WIDTH,
    half_width,
    momentum_merge,
    momentum_row,
    momentum_squares,
    momentum_value,
    spread_add,
    spread_merge,
    spread_variance,
    step_variance,
)


def recursion(rounds: list[dict[int, torch.Tensor]], n: int, width: int, mu: float) -> torch.Tensor:
    value = torch.full((n, width), float("nan"), dtype=torch.float64)
    for seen in rounds:
        for i, now in seen.items():
            value[i] = now if value[i].isnan().all() else mu * value[i] + (1 - mu) * now
    return value


def rows_of(seen: dict[int, torch.Tensor], n: int, width: int, mu: float) -> torch.Tensor:
    rows = torch.zeros(n, 2 * width + 1, dtype=torch.float64)
    for i, now in seen.items():
        rows[i] = momentum_row(now[None], mu)[0]
    return rows


def test_any_grouping_of_the_rounds_gives_the_recursion() -> None:
    torch.manual_seed(0)
    n, width, mu = 5, 3, 0.8
    rounds = [
        {i: torch.randn(width, dtype=torch.float64) for i in torch.randperm(n)[:3].tolist() if i != 4} for _ in range(7)
    ]
    parts = torch.stack([rows_of(seen, n, width, mu) for seen in rounds])
    expected = recursion(rounds, n, width, mu)
    assert expected[4].isnan().all()
    for cut in range(1, 7):
        early, late = momentum_merge(parts[:cut], mu), momentum_merge(parts[cut:], mu)
        merged = momentum_value(momentum_merge(torch.stack([early, late]), mu), mu)
        torch.testing.assert_close(merged, expected, equal_nan=True)


@pytest.mark.parametrize("confidence", [0.5, 0.95])
@pytest.mark.parametrize("c", [2, 20])
def test_the_bound_of_a_t_interval(c: int, confidence: float) -> None:
    values = torch.randn(c, 4, generator=torch.Generator().manual_seed(c), dtype=torch.float64)
    mean, squares = values.mean(0), (values - values.mean(0)).square().sum(0)
    found = lower_bound(torch.full((4,), c), mean, squares, confidence=confidence)
    for column, bound in zip(values.T.numpy(), found.tolist()):
        expected = stats.t.interval(2 * confidence - 1, c - 1, column.mean(), stats.sem(column))[0]
        assert bound == pytest.approx(expected if confidence > 0.5 else column.mean())


def folded(values: torch.Tensor) -> torch.Tensor:
    """Of ``[T, n]``, NaN for clients outside the cohort."""
    rows = torch.zeros(values.shape[1], WIDTH, dtype=values.dtype)
    for value in values:
        ids = (~value.isnan()).nonzero().flatten()
        rows = spread_add(rows, ids, value[ids])
    return rows


def blocks_of(count: int) -> list[range]:
    found, begin = [], 0
    while begin < count:
        length = int((len(found) + 1) ** 0.5)
        found.append(range(begin, min(begin + length, count)))
        begin += length
    return found


def made(rounds: int) -> torch.Tensor:
    return torch.randn(rounds, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64) + 7


@pytest.mark.parametrize("rounds", [2, 4, 30])
def test_it_is_the_mean_square_of_the_blocks_deviations(rounds: int) -> None:
    values = made(rounds)
    variance, count = spread_variance(folded(values))
    blocks = blocks_of(rounds)
    mean = values.mean(0)
    sums = torch.stack([(values[list(block)] - mean).sum(0) for block in blocks])
    expected = sums.square().sum(0) / rounds * len(blocks) / (len(blocks) - 1)
    torch.testing.assert_close(variance, expected)
    assert count.tolist() == [len(blocks)] * 3


def test_one_block_says_nothing_and_equal_values_are_exact() -> None:
    assert spread_variance(folded(made(1)))[0].isnan().all()
    rows = folded(torch.full((9, 1), 0.1, dtype=torch.float32))
    assert spread_variance(rows)[0].item() == 0
    assert half_width(torch.ones(2), torch.tensor([0.0, torch.nan]), 0.9).isnan().all()


@pytest.mark.parametrize("rounds", [2, 3, 10])
def test_steps_are_half_the_mean_square_of_successive_differences(rounds: int) -> None:
    values = made(rounds)
    variance, freedom = step_variance(folded(values))
    torch.testing.assert_close(variance, values.diff(dim=0).square().mean(0) / 2)
    differences = np.diff(np.eye(rounds), axis=0)
    form = differences.T @ differences  # a quadratic form's degrees of freedom are tr^2 / tr of the square
    assert freedom[0].item() == pytest.approx(np.trace(form) ** 2 / np.trace(form @ form))
    assert step_variance(folded(made(1)))[0].isnan().all()


def test_steps_of_an_absent_client_are_between_its_own_rounds_and_stretches_join_exactly() -> None:
    values = made(8)
    values[2:5, 1] = torch.nan
    values[:, 2] = torch.nan
    own = values[~values[:, 1].isnan(), 1]
    variance, _ = step_variance(folded(values))
    torch.testing.assert_close(variance[1], own.diff().square().mean() / 2)
    for cut in range(9):
        both = spread_merge(torch.stack([folded(values[:cut]), folded(values[cut:])]))
        torch.testing.assert_close(step_variance(both)[0], variance, equal_nan=True)
        assert torch.equal(both[:, 10], folded(values)[:, 10])


def test_a_round_joins_and_a_stretch_is_appended() -> None:
    values = made(12)
    values[3:6, 1] = torch.nan  # absent
    values[:, 2] = torch.nan
    one_by_one = folded(values[:1])
    for index in range(1, 12):
        one_by_one = spread_merge(torch.stack([one_by_one, folded(values[index : index + 1])]))
    torch.testing.assert_close(one_by_one, folded(values))
    both = spread_merge(torch.stack([folded(values[:5]), folded(values[5:])]))
    cuts = [blocks_of(5), blocks_of(7)]
    mean = values[:, 0].mean()
    sums = [(part[list(b), 0] - mean).sum() for part, bs in zip((values[:5], values[5:]), cuts) for b in bs]
    count = len(sums)
    expected = torch.stack(sums).square().sum() / 12 * count / (count - 1)
    torch.testing.assert_close(spread_variance(both)[0][0], expected)
    assert both[0, 1] == values[0, 0]
    assert torch.equal(both[2], torch.zeros(WIDTH, dtype=torch.float64))
    idle = torch.zeros(3, WIDTH, dtype=torch.float64)
    for stretches in ([idle, folded(values)], [folded(values), idle]):
        assert torch.equal(spread_merge(torch.stack(stretches)), folded(values))


@pytest.mark.parametrize("momentum", [0.0, 0.3, 0.9])
@pytest.mark.parametrize("init", [False, True])
def test_factors_of_a_moving_average(momentum: float, init: bool) -> None:
    for count in (1, 2, 5):
        factors: list[float] = []
        for index in range(count):
            new = 1 - momentum if init or index else 1.0
            factors = [*(momentum * factor for factor in factors), new]
        expected = sum(factor**2 for factor in factors)
        assert float(momentum_squares(torch.tensor(float(count)), momentum, init)) == pytest.approx(expected, rel=1e-6)
