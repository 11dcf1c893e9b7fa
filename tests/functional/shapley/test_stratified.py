"""Means by player and size."""

from __future__ import annotations

import torch
from functional.shapley.games import rng

from flsv.functional.shapley.stratified import efficient, stratum_means


def test_means_and_their_variance() -> None:
    members = torch.tensor([[True, True], [True, False], [True, False]])
    values = torch.tensor([[1.0], [2.0], [6.0]], dtype=torch.float64)
    mean, influences = stratum_means(members, values)
    assert mean.tolist() == [[3.0], [1.0]]
    # Player 0: the variance of a mean of three; player 1, a single draw: the deviation from the mean of all draws.
    torch.testing.assert_close(influences[:, 0].square().sum(), values.var() / 3)
    assert influences[:, 1].flatten().tolist() == [-1.5, 0.0, 0.0]


def test_efficient_never_hurts() -> None:
    truth = torch.tensor([[1.0], [2.0], [3.0]])
    noisy = truth + torch.randn(100, 3, 1, generator=rng())
    fixed = efficient(noisy, truth.sum(dim=0))
    torch.testing.assert_close(fixed.sum(dim=1), torch.full((100, 1), 6.0))
    assert ((fixed - truth).square().sum(dim=1) <= (noisy - truth).square().sum(dim=1) + 1e-6).all()
