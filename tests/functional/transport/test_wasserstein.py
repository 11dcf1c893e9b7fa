"""Exact transport against POT, and points on the geodesic."""

import pytest
import torch
from functional.transport.samples import make_labeled, wasserstein_distance
from torch.testing import assert_close

from flsv.functional import TransportClient, contribution_shares, interpolating_measure
from flsv.functional.transport.wasserstein import matching
from helpers import refused


@pytest.mark.parametrize("p", [1, 2])
def test_distance_of_a_matching_equals_pots(p):
    x, _ = make_labeled(0)
    x2, _ = make_labeled(1, m=25)

    _, distance = matching(x, x2, p)
    _, distance_to_itself = matching(x, x.flip(0), p)

    assert_close(
        distance,
        wasserstein_distance(x, x2, p),
        rtol=1e-9,
        atol=0,
    )
    assert distance_to_itself == 0


@pytest.mark.parametrize(
    ("distances", "expected"),
    [
        pytest.param(
            [1.0, 2.0, 4.0],
            [4 / 7, 2 / 7, 1 / 7],
            id="positive",
        ),
        pytest.param(
            [torch.nan, 0.0, 3.0, 0.0],
            [torch.nan, 0.5, 0.0, 0.5],
            id="two of 0",
        ),
        pytest.param(
            [2.0, torch.inf],
            [1.0, 0.0],
            id="infinite",
        ),
        pytest.param(
            [1e-300, 1e-300],
            [0.5, 0.5],
            id="tiny",
        ),
        pytest.param(
            [torch.nan, torch.nan],
            [torch.nan, torch.nan],
            id="unknown",
        ),
    ],
)
def test_contribution_shares_are_proportional_to_inverse_distances(distances, expected):
    shares = contribution_shares(torch.tensor(distances, dtype=torch.float64))

    assert_close(
        shares,
        torch.tensor(expected, dtype=torch.float64),
        equal_nan=True,
    )


def test_contribution_shares_of_negative_distances_are_refused():
    with refused("at least 0"):
        contribution_shares(torch.tensor([-1.0, 1.0]))


def test_interpolating_measure_of_equal_sizes_lies_on_the_geodesic():
    (
        t,
        (x, _),
        (x2, _),
    ) = 0.25, make_labeled(0), make_labeled(1)
    whole = wasserstein_distance(x, x2)
    gamma = interpolating_measure(x, x2, t=t)
    assert_close(wasserstein_distance(x, gamma), t * whole)
    assert_close(wasserstein_distance(gamma, x2), (1 - t) * whole)


def test_interpolation_of_unequal_sizes_moves_the_first_side():
    """Equation 6, with the plan written out: 4 points to 2, in order on the line."""
    x = torch.tensor([[3.0], [0.0], [2.0], [1.0]])
    x2 = torch.tensor([[10.0], [20.0]])

    answer, _ = TransportClient(x, allow_reconstruction=True).respond(x2)
    moved = interpolating_measure(x, x2)

    # 0 and 1 are paired with 10, 2 and 3 with 20: halfway of 10 and 0.5, and of 20 and 2.5.
    halfway = torch.tensor(
        [
            [(10 + 0.5) / 2],
            [(20 + 2.5) / 2],
        ]
    )
    halves_of_pairs = torch.tensor(
        [
            [(3 + 20) / 2],
            [(0 + 10) / 2],
            [(2 + 20) / 2],
            [(1 + 10) / 2],
        ]
    )
    assert_close(answer, halfway)
    assert_close(moved, halves_of_pairs)
