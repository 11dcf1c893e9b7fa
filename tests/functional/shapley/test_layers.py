"""The layered sample: distinct, complete at the ends, covering, uniform."""

from __future__ import annotations

import math

import pytest
import torch
from functional.shapley.games import rng

from flsv.functional.shapley.layers import LayeredSample, layer_variance


@pytest.mark.parametrize("n", [1, 2, 3, 4, 7, 8, 20])
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
    assert counts[1] == counts[39] == 40
    for size in (5, 10, 30):
        assert counts[size] / counts[20] == pytest.approx(math.sqrt(20 * 20 / (size * (n - size))), abs=0.03)


@pytest.mark.slow
def test_every_coalition_of_a_layer_is_equally_likely() -> None:
    counts: dict[tuple[bool, ...], int] = {}
    for seed in range(3000):
        sample = LayeredSample(6, paired=False, cover=True, generator=rng(seed))
        sample.grow(sample.minimum)
        for row in sample.layers[1].masks.tolist():
            counts[tuple(row)] = counts.get(tuple(row), 0) + 1
    assert len(counts) == 15
    assert max(abs(count - 600) for count in counts.values()) < 4.5 * 600**0.5


def test_variance_of_complete_and_single_draws() -> None:
    sample = LayeredSample(4, paired=False, generator=rng())
    sample.grow(sample.minimum)
    ends, middle = sample.layers[0], sample.layers[1]
    middle.masks = middle.masks[:1]
    assert (layer_variance(ends, torch.ones(4, 4, 1)) == 0).all()
    assert layer_variance(middle, torch.ones(1, 4, 1)).isnan().all()
