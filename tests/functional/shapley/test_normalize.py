"""Normalized Shapley values, by cases and equation 12."""

import pytest
import torch

from flsv.functional import normalize_shapley

NAN = float("nan")


@pytest.mark.parametrize(
    ("values", "how", "expected"),
    [
        (
            [
                [1.0, 5.0],
                [2.0, 5.0],
                [NAN, 5.0],
                [5.0, NAN],
            ],
            "min-max",
            [
                [0, 0.5],
                [0.25, 0.5],
                [NAN, 0.5],
                [1, NAN],
            ],
        ),
        ([-0.2, -0.2, -0.2 * (1 + 1e-15)], "min-max", [0.5] * 3),
        ([], "min-max", []),
        ([-1.0, 0.0, 2.0, 4.0, NAN], "positive", [0.0, 0.0, 0.5, 1.0, NAN]),
        ([-2.0, -1.0], "positive", [0.0, 0.0]),
        ([1e-16, 1.0], "positive", [0.0, 1.0]),  # what is left of a null player's 0
    ],
)
def test_normalized_shapley_values_equal_those_by_hand(values, how, expected):
    normalized = normalize_shapley(torch.tensor(values, dtype=torch.float64), how)

    by_hand = torch.tensor(expected, dtype=torch.float64)
    torch.testing.assert_close(normalized, by_hand, equal_nan=True)


def test_infinite_values_are_not_normalized():
    with pytest.raises(ValueError, match=r"players \[1\] are infinite"):
        normalize_shapley(torch.tensor([1.0, float("inf")]))
