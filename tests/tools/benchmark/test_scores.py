"""Scores of values that are missing, negative or constant."""

import pytest
import torch

from benchmark.scores import share_error, shares, spearman

NAN = float("nan")


def test_correlation_of_constant_or_missing_values_is_zero():
    truth = torch.tensor([1.0, 2.0, 3.0])
    assert spearman(torch.ones(3), truth) == 0
    assert spearman(torch.full((3,), NAN), truth) == 0


def test_clients_without_a_value_rank_last():
    truth = torch.tensor([1.0, 2.0, 3.0])
    unknown = torch.tensor([NAN, 2.0, 3.0])
    lowest = torch.tensor([2.0, 2.0, 3.0])  # as much as the least

    assert spearman(unknown, truth) == pytest.approx(spearman(lowest, truth))


def test_shares_of_clients_with_negative_values_are_zero_unless_all_are_negative():
    assert shares(torch.tensor([-5.0, 1.0, 3.0])).tolist() == [
        0,
        0.25,
        0.75,
    ]
    assert shares(torch.tensor([-5.0, -1.0])).tolist() == [
        0.5,
        0.5,
    ]
    assert (
        share_error(
            torch.tensor([1.0, 0.0]),
            torch.tensor([0.0, 1.0]),
        )
        == 1
    )
