"""Variances over rounds against NumPy, by blocks and by steps."""

import numpy as np
import pytest
import torch

from flsv.functional.confidence import half_width
from flsv.metrics.intervals import WIDTH, spread_add, spread_merge, spread_variance, step_variance


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
def test_spread_variance_is_the_mean_square_of_block_deviations(rounds: int) -> None:
    values = made(rounds)
    variance, count = spread_variance(folded(values))
    blocks = blocks_of(rounds)
    mean = values.mean(0)
    sums = torch.stack([(values[list(block)] - mean).sum(0) for block in blocks])
    expected = sums.square().sum(0) / rounds * len(blocks) / (len(blocks) - 1)
    torch.testing.assert_close(variance, expected)
    assert count.tolist() == [len(blocks)] * 3


def test_spread_variance_of_one_round_is_nan_and_of_equal_values_0() -> None:
    assert spread_variance(folded(made(1)))[0].isnan().all()
    rows = folded(torch.full((9, 1), 0.1, dtype=torch.float32))
    assert spread_variance(rows)[0].item() == 0
    assert half_width(torch.ones(2), torch.tensor([0.0, torch.nan]), 0.9).isnan().all()


@pytest.mark.parametrize("rounds", [2, 3, 10])
def test_step_variance_is_half_the_mean_square_of_successive_differences(rounds: int) -> None:
    values = made(rounds)
    variance, freedom = step_variance(folded(values))
    torch.testing.assert_close(variance, values.diff(dim=0).square().mean(0) / 2)
    differences = np.diff(np.eye(rounds), axis=0)
    form = differences.T @ differences  # a quadratic form's degrees of freedom are tr^2 / tr of the square
    assert freedom[0].item() == pytest.approx(np.trace(form) ** 2 / np.trace(form @ form))
    assert step_variance(folded(made(1)))[0].isnan().all()


def test_step_variance_of_an_absent_client_uses_its_own_rounds_and_merges_exactly() -> None:
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


def test_merged_statistics_of_single_rounds_equal_one_pass_over_all_rounds() -> None:
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
