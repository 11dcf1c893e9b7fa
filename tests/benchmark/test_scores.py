"""Scores of values that are missing, negative or constant."""

import math

import pytest
import torch

from flsv.benchmark.scores import auroc, share_error, shares, spearman

NAN = float("nan")


def test_correlation_of_constant_or_missing_values_is_zero_and_auroc_of_one_class_is_nan() -> None:
    truth = torch.tensor([1.0, 2.0, 3.0])
    assert spearman(torch.ones(3), truth) == 0
    assert spearman(torch.full((3,), NAN), truth) == 0
    assert math.isnan(auroc(truth, torch.zeros(3, dtype=torch.bool)))


def test_clients_without_a_value_rank_last() -> None:
    truth = torch.tensor([1.0, 2.0, 3.0])
    filled = spearman(torch.tensor([2.0, 2, 3]), truth)

    assert spearman(torch.tensor([NAN, 2.0, 3.0]), truth) == pytest.approx(filled)
    assert (
        auroc(torch.tensor([0.1, 0.5, NAN]), torch.tensor([False, False, True])) == 0.75
    )  # equal to the least


def test_shares_of_clients_with_negative_values_are_zero_unless_all_are_negative() -> None:
    assert shares(torch.tensor([-5.0, 1.0, 3.0])).tolist() == [0, 0.25, 0.75]
    assert shares(torch.tensor([-5.0, -1.0])).tolist() == [0.5, 0.5]
    assert share_error(torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0])) == 1
