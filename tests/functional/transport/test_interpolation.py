"""Interpolating measures on the geodesic."""

import torch
from functional.transport.samples import labeled

from flsv.functional import (
    TransportClient,
    interpolating_measure,
    wasserstein_distance,
)


def test_interpolating_measure_of_equal_sizes_lies_on_the_geodesic() -> None:
    t, (x, _), (x2, _) = 0.25, labeled(0), labeled(1)
    whole, gamma = wasserstein_distance(x, x2), interpolating_measure(x, x2, t=t)
    torch.testing.assert_close(wasserstein_distance(x, gamma), t * whole)
    torch.testing.assert_close(wasserstein_distance(gamma, x2), (1 - t) * whole)


def test_interpolation_of_unequal_sizes_moves_the_first_side() -> None:
    """Equation 6, with the plan written out: 4 points to 2, in order on the line."""
    x, x2 = torch.tensor([[3.0], [0.0], [2.0], [1.0]]), torch.tensor([[10.0], [20.0]])
    answered, _ = TransportClient(x, allow_reconstruction=True).answer(x2)
    torch.testing.assert_close(answered, torch.tensor([[5.25], [11.25]]))
    moved = interpolating_measure(x, x2)
    torch.testing.assert_close(moved, torch.tensor([[11.5], [5.0], [11.0], [5.5]]))
