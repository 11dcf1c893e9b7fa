"""Decayed Shapley values against Algorithm 1 of Guo et al. by hand, and the rounds in which it has no meaning."""

import pytest
import torch
from torch.testing import assert_close

from flsv.functional import MULTI_ROUND_INDICES, decayed_shapley
from flsv.functional.shapley.decayed import round_shares
from flsv.utilities.errors import ConfigurationError
from helpers import make_generator

NAN = float("nan")


@pytest.mark.parametrize(
    ("rows", "options", "expected"),
    [
        # Shares 1/7, 2/7, 4/7 and 3/6, 2/6, 1/6.
        (
            [[0.1, 0.2, 0.4], [0.3, 0.2, 0.1]],
            {"decay": 0.5},
            [
                1 / 14 + 1 / 8,
                1 / 7 + 1 / 12,
                2 / 7 + 1 / 24,
            ],
        ),
        # Both signs, with a gain: literally; without a gain: by absolute values.
        (
            [[0.3, -0.1]],
            {"decay": 0.5},
            [0.75, -0.25],
        ),
        (
            [[0.1, -0.3]],
            {"decay": 0.5},
            [0.125, -0.375],
        ),
        # A skipped round keeps its place.
        ([[0.0, 0.0], [0.2, 0.2]], {"decay": 0.5}, [0.125, 0.125]),
        (
            [
                [0.3, NAN, 0.1, NAN],
                [NAN, NAN, 0.5, -0.1],
            ],
            {"decay": 0.5},
            [0.375, NAN, 0.125 + 0.3125, -0.0625],
        ),
        (
            [[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]],
            {"decay": 0.5, "threshold": 0.25},
            [0.75, 0.0],
        ),
        (
            [[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]],
            {"decay": 0.5, "threshold": 0.26},
            [0.5, 0.0],
        ),
        (
            [[0.4, 0.3], [-0.1, 0.0], [NAN, 0.2]],
            {"decay": 0.5, "normalize": False},
            [0.175, 0.175],
        ),
    ],
)
def test_decayed_shapley_is_the_sum_by_hand(rows, options, expected):
    rounds = torch.tensor(rows, dtype=torch.float64)

    values = decayed_shapley(rounds, **options)

    by_hand = torch.tensor(expected, dtype=torch.float64)
    assert_close(values, by_hand, equal_nan=True)


def test_multi_round_indices_are_sums_of_values_shares_and_decayed_shares():
    values = torch.rand(12, 3, generator=make_generator(), dtype=torch.float64)
    shares = values / values.sum(1, keepdim=True)

    indices = {}
    for name, options in MULTI_ROUND_INDICES.items():
        indices[name] = decayed_shapley(values, **options)

    # Rounds weigh 0.8, 0.64, ... and are left out below 0.1: 0.8^10 = 0.107, 0.8^11 = 0.086.
    decayed_shares = torch.zeros(3, dtype=torch.float64)
    for index in range(10):
        decayed_shares += 0.8 ** (index + 1) * shares[index]
    assert_close(indices["SOR"], values.sum(0))
    assert_close(indices["MR"], shares.sum(0))
    assert_close(indices["TMR"], decayed_shares)


def test_float32_values_that_cancel_have_bounded_shares():
    """Rounding leaves a sum of 1e-8: divided by it, the shares would be millions."""
    shares, skipped, flagged = round_shares(torch.tensor([0.1, 0.2, -0.3]))
    assert (skipped, flagged) == (False, True)
    assert shares.tolist() == pytest.approx([1 / 6, 2 / 6, -3 / 6])


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"decay": 0.0}, ConfigurationError, r"decay=0.0\): expected a finite number in \(0, 1\]"),
        ({"threshold": -0.1}, ConfigurationError, "threshold=-0.1"),
        ({"decay": 0.5, "threshold": 0.6}, ConfigurationError, "no round counts"),
        ({"values": torch.zeros(3)}, ValueError, r"values \[T, n\]"),
    ],
)
def test_decayed_shapley_refuses_wrong_arguments(arguments, error, message):
    with pytest.raises(error, match=message):
        decayed_shapley(**{"values": torch.ones(2, 2), **arguments})
