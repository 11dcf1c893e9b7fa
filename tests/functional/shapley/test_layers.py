"""Coalitions drawn by size."""

import math

import pytest
from functional.shapley.games import rng

from flsv.functional.shapley.stratified import LayeredSample


@pytest.mark.parametrize("n", [1, 2, 7, 8, 20])
@pytest.mark.parametrize("paired", [True, False])
@pytest.mark.parametrize("cover", [True, False])
def test_layered_sample_grows_to_the_total_without_a_coalition_twice(n: int, paired: bool, cover: bool) -> None:
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


def test_draws_per_size_follow_the_inverse_root_of_s_times_n_minus_s() -> None:
    n, sample = 40, LayeredSample(40, paired=False, generator=rng())
    sample.grow(4000)
    counts = {layer.size: len(layer.masks) for layer in sample.layers}
    for size in (5, 10, 30):
        assert counts[size] / counts[20] == pytest.approx(math.sqrt(20 * 20 / (size * (n - size))), abs=0.03)
