"""Interpolating measures: points on the Wasserstein geodesic between two sets of samples.

Li et al., "Data Valuation and Detections in Federated Learning" (FedBary), CVPR 2024, definition 4 and equation 6,
after Rakotomamonjy et al., "Federated Wasserstein Distance", ICLR 2024 (arXiv 2310.01973).

With as many points on both sides the optimal plan is a permutation, and moving each point along it (McCann) gives the
geodesic itself. With S points on one side only, each of them moves towards the mean of the points matched with it: a
barycentric projection, which stays near the geodesic and averages m/S samples into a point.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flsv.functional.distances import squared_distances
from flsv.functional.transport.checks import Exponent, Place, check_pair
from flsv.functional.transport.wasserstein import transport_plan
from flsv.utilities.declared import checked


@checked
def interpolating_measure(x: Tensor, x2: Tensor, *, t: Place = 0.5, p: Exponent = 2) -> Tensor:
    """Move the points of ``x`` part of the way to ``x2`` (eq. 6); on the geodesic if m2 = m.

    Args:
        x: ``[m, d]`` samples, equally heavy.
        x2: ``[m2, d]`` samples, equally heavy.
        t: the place on the way, in (0, 1): 0 is ``x``, 1 is ``x2``.
        p: the exponent of the plan's cost.

    Returns:
        ``[m, d]`` in the dtype of ``x``.

    Raises:
        ConfigurationError: wrong samples, t or p.

    Example:
        >>> interpolating_measure(torch.tensor([[0.0], [1.0]]), torch.tensor([[5.0], [2.0]]), t=0.25)
        tensor([[0.5000],
                [2.0000]])
    """
    check_pair(x, x2)
    return interpolate_along(x, x2, matching(x, x2, p)[0], len(x), t)


def matching(x: Tensor, x2: Tensor, p: float) -> tuple[Tensor, Tensor]:
    """Compute the optimal plan ``[m, m2]`` between two sets of points, and W_p."""
    plan, distance = transport_plan(squared_distances(x, x2), p)
    return plan.to(x), distance.to(x)


def interpolate_along(x: Tensor, x2: Tensor, plan: Tensor, support: int, t: float) -> Tensor:
    """Interpolate along a plan (eq. 6), on the side that has ``support`` points."""
    if support == len(x):
        return torch.lerp(x, len(x) * (plan @ x2), t)
    return torch.lerp(len(x2) * (plan.T @ x), x2, t)
