"""Means of strata and their variance."""

import torch

from flsv.functional.shapley.stratified import stratum_means


def test_stratum_means_and_influences_equal_those_by_hand() -> None:
    members = torch.tensor([[True, True], [True, False], [True, False]])
    values = torch.tensor([[1.0], [2.0], [6.0]], dtype=torch.float64)
    mean, influences = stratum_means(members, values)
    assert mean.tolist() == [[3.0], [1.0]]
    # Player 0: the variance of a mean of three; player 1, a single draw: the deviation from the mean of all draws.
    torch.testing.assert_close(influences[:, 0].square().sum(), values.var() / 3)
    assert influences[:, 1].flatten().tolist() == [-1.5, 0.0, 0.0]
