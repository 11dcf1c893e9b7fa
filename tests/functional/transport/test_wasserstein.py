"""Exact transport against SciPy and POT, and points on the geodesic."""

import ot
import pytest
import torch
from functional.transport.samples import make_labeled

from flsv.functional import (
    TransportClient,
    contribution_shares,
    interpolating_measure,
    label_augmented_cost,
    wasserstein_distance,
)
from flsv.utilities.errors import ConfigurationError


@pytest.mark.parametrize("p", [1, 2])
def test_wasserstein_distance_equals_pots_emd2(p: int) -> None:
    x, y = make_labeled(0)
    x2, y2 = make_labeled(1, m=25)

    distance = wasserstein_distance(x, x2, y=y, y2=y2, p=p, label_weight=2.0)

    squared = label_augmented_cost(x, y, x2, y2, label_weight=2.0).numpy()
    expected = ot.emd2(
        [],
        [],
        squared ** (p / 2),
    ) ** (1 / p)

    assert float(distance) == pytest.approx(expected, rel=1e-9)
    assert (
        wasserstein_distance(
            x,
            x.flip(0),
            y=y,
            y2=y.flip(0),
            p=p,
        )
        == 0
    )


@pytest.mark.parametrize(
    ("distances", "expected"),
    [
        pytest.param(
            [1.0, 2.0, 4.0],
            [
                4 / 7,
                2 / 7,
                1 / 7,
            ],
            id="positive",
        ),
        pytest.param(
            [torch.nan, 0.0, 3.0, 0.0],
            [
                torch.nan,
                0.5,
                0.0,
                0.5,
            ],
            id="two of 0",
        ),
        pytest.param([2.0, torch.inf], [1.0, 0.0], id="infinite"),
        pytest.param([1e-300, 1e-300], [0.5, 0.5], id="tiny"),
        pytest.param([torch.nan, torch.nan], [torch.nan, torch.nan], id="unknown"),
    ],
)
def test_contribution_shares_are_proportional_to_inverse_distances(
    distances: list[float], expected: list[float]
) -> None:
    shares = contribution_shares(torch.tensor(distances, dtype=torch.float64))

    torch.testing.assert_close(
        shares,
        torch.tensor(expected, dtype=torch.float64),
        equal_nan=True,
    )


def test_contribution_shares_of_negative_distances_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="at least 0"):
        contribution_shares(torch.tensor([-1.0, 1.0]))


def test_interpolating_measure_of_equal_sizes_lies_on_the_geodesic() -> None:
    t, (x, _), (x2, _) = 0.25, make_labeled(0), make_labeled(1)
    whole = wasserstein_distance(x, x2)
    gamma = interpolating_measure(x, x2, t=t)
    torch.testing.assert_close(wasserstein_distance(x, gamma), t * whole)
    torch.testing.assert_close(wasserstein_distance(gamma, x2), (1 - t) * whole)


def test_interpolation_of_unequal_sizes_moves_the_first_side() -> None:
    """Equation 6, with the plan written out: 4 points to 2, in order on the line."""
    x = torch.tensor([[3.0], [0.0], [2.0], [1.0]])
    x2 = torch.tensor([[10.0], [20.0]])

    answer, _ = TransportClient(x, allow_reconstruction=True).answer(x2)
    moved = interpolating_measure(x, x2)

    # 0 and 1 are paired with 10, 2 and 3 with 20: halfway of 10 and 0.5, and of 20 and 2.5.
    halfway = torch.tensor([[(10 + 0.5) / 2], [(20 + 2.5) / 2]])
    halves_of_pairs = torch.tensor(
        [
            [(3 + 20) / 2],
            [(0 + 10) / 2],
            [(2 + 20) / 2],
            [(1 + 10) / 2],
        ]
    )
    torch.testing.assert_close(answer, halfway)
    torch.testing.assert_close(moved, halves_of_pairs)
