"""Uniform orders and coalitions."""

from __future__ import annotations

import itertools

import torch
from functional.shapley.games import rng

from flsv.functional.shapley.sampling import prefixes, random_coalitions, random_permutations


def test_orders_are_uniform() -> None:
    orders = random_permutations(24_000, 4, rng())
    counts = torch.stack(
        [(orders == torch.tensor(order)).all(dim=1).sum() for order in itertools.permutations(range(4))]
    )
    assert counts.sum() == 24_000
    assert (counts - 1000).abs().max() < 4.5 * 1000**0.5


def test_coalitions_of_a_size_are_uniform() -> None:
    masks = random_coalitions(torch.full((15_000,), 2), 6, rng())
    assert (masks.sum(dim=1) == 2).all()
    counts = torch.unique(masks, dim=0, return_counts=True)[1]
    assert len(counts) == 15
    assert (counts - 1000).abs().max() < 4.5 * 1000**0.5


def test_prefixes_follow_the_order() -> None:
    orders = random_permutations(5, 6, rng())
    for order, masks in zip(orders, prefixes(orders), strict=True):
        for k, mask in enumerate(masks, start=1):
            assert set(mask.nonzero().flatten().tolist()) == set(order[:k].tolist())
