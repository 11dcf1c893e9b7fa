"""Streams of random numbers are functions of their names."""

import random

import numpy as np
import torch

from flsv.utilities.seeding import derive_seed, seed_global_rngs


def test_streams_differ_by_every_part_of_their_name():
    names = [
        (),
        ("a",),
        ("b",),
        ("a", 0),
        ("a", 1),
        (0, "a"),
        ("a", 0, 1),
        ("a", 1, 0),
    ]
    seeds = []
    for run_seed in (0, 1, -1, 2**63):
        seeds += [derive_seed(run_seed, *name) for name in names]

    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_seed_global_rngs_makes_draws_repeat():
    def draw():
        of_numpy = float(np.random.rand())  # noqa: NPY002
        return random.random(), of_numpy, torch.rand(()).item()

    seed_global_rngs(1, "a")
    numbers = draw()

    assert draw() != numbers

    seed_global_rngs(1, "a")
    assert draw() == numbers

    seed_global_rngs(1, "b")
    assert draw() != numbers
