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
    unknown = torch.tensor([NAN, 2.0, 3.0])
    lowest = torch.tensor([2.0, 2.0, 3.0])  # as much as the least

    assert spearman(
        unknown,
        truth,
    ) == pytest.approx(spearman(lowest, truth))


def test_bad_client_without_a_value_is_told_apart_as_the_least() -> None:
    values = torch.tensor([0.1, 0.5, NAN])
    is_bad = torch.tensor([False, False, True])

    # It ties with the first, which counts for half, and is below the second.
    assert auroc(values, is_bad) == (0.5 + 1) / 2


def test_shares_of_clients_with_negative_values_are_zero_unless_all_are_negative() -> None:
    assert shares(torch.tensor([-5.0, 1.0, 3.0])).tolist() == [0, 0.25, 0.75]
    assert shares(torch.tensor([-5.0, -1.0])).tolist() == [0.5, 0.5]
    assert share_error(torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0])) == 1
