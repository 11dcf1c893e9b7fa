"""Coalitions drawn by size, means of strata and their variance."""

import math

import pytest
import torch
from functional.shapley.games import rng

from flsv.functional.shapley.stratified import LayeredSample, stratum_means


@pytest.mark.parametrize("n", [1, 2, 7, 8, 20])
@pytest.mark.parametrize("paired", [True, False])
@pytest.mark.parametrize("cover", [True, False])
def test_layered_sample_draws_the_total_without_a_coalition_twice(n: int, paired: bool, cover: bool) -> None:
    smallest = LayeredSample(n, paired=paired, cover=cover).minimum
    for more in (0, 7, 300):
        sample = LayeredSample(n, paired=paired, cover=cover, generator=rng())
        assert sample.capacity == (2 ** (n - 1) - 1 if paired else 2**n - 2)
        total = min(smallest + more, sample.capacity)
        sample.draw(total)
        assert sum(len(layer.masks) for layer in sample.layers) == total
        for layer in sample.layers:
            rows = set(map(tuple, layer.masks.tolist()))
            assert len(rows) == len(layer.masks)
            assert (layer.masks.sum(dim=1) == layer.size).all()
            if paired:
                assert not rows & set(map(tuple, (~layer.masks).tolist())), "a pair counted twice"
            if min(layer.size, n - layer.size) == 1:
                assert len(rows) == layer.capacity
            if cover and not (paired and 2 * layer.size == n):
                assert layer.masks.any(dim=0).all()
                assert (~layer.masks).any(dim=0).all()


def test_draws_per_size_follow_the_inverse_root_of_s_times_n_minus_s() -> None:
    n, sample = 40, LayeredSample(40, paired=False, generator=rng())
    sample.draw(4000)
    counts = {layer.size: len(layer.masks) for layer in sample.layers}
    for size in (5, 10, 30):
        assert counts[size] / counts[20] == pytest.approx(math.sqrt(20 * 20 / (size * (n - size))), abs=0.03)


def test_stratum_means_and_influences_equal_those_by_hand() -> None:
    members = torch.tensor([[True, True], [True, False], [True, False]])
    values = torch.tensor([[1.0], [2.0], [6.0]], dtype=torch.float64)
    mean, influences = stratum_means(members, values)
    assert mean.tolist() == [[3.0], [1.0]]
    # Player 0: the variance of a mean of three; player 1, a single draw: the deviation from the mean of all draws.
    torch.testing.assert_close(influences[:, 0].square().sum(), values.var() / 3)
    assert influences[:, 1].flatten().tolist() == [-1.5, 0.0, 0.0]
