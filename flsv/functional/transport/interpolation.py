"""Interpolating measures: points on the Wasserstein geodesic between two sets of samples.

Li et al., "Data Valuation and Detections in Federated Learning" (FedBary), CVPR 2024, definition 4 and equation 6,
after Rakotomamonjy et al., "Federated Wasserstein Distance", ICLR 2024 (arXiv 2310.01973).

If both sides have the same number of points, the optimal plan is a permutation, and moving each point towards its
partner gives the geodesic itself (McCann). If one side has S points and the other m samples, each of the S points moves
towards the mean of the samples that the plan matches with it: a barycentric projection, which stays near the geodesic
and averages m/S samples into a point.
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
    """Move each point of ``x`` part of the way to the mean of its partners in ``x2`` in the optimal plan (eq. 6).

    If both sides have the same number of points, the result is on the Wasserstein geodesic between them.

    Args:
        x: equally heavy samples, ``[m, d]``.
        x2: equally heavy samples, ``[m2, d]``.
        t: the position between ``x`` (0) and ``x2`` (1), in (0, 1).
        p: the exponent of the distance in the optimal plan's cost, at least 1.

    Returns:
        The interpolating measure's points, ``[m, d]``, in the dtype of ``x``.

    Raises:
        ConfigurationError: the samples are empty, not finite or of wrong shapes, or ``t`` or ``p`` is out of range.

    Example:
        >>> interpolating_measure(torch.tensor([[0.0], [1.0]]), torch.tensor([[5.0], [2.0]]), t=0.25)
        tensor([[0.5000],
                [2.0000]])
    """
    check_pair(x, x2)
    return interpolate_along(x, x2, matching(x, x2, p)[0], len(x), t)


def matching(x: Tensor, x2: Tensor, p: float) -> tuple[Tensor, Tensor]:
    """Compute the optimal transport between two sets of equally heavy points.

    Args:
        x: the points of the first set, ``[m, d]``.
        x2: the points of the second set, ``[m2, d]``.
        p: the exponent of the distance, at least 1.

    Returns:
        The optimal plan ``[m, m2]``, and the Wasserstein distance W_p.
    """
    plan, distance = transport_plan(squared_distances(x, x2), p)
    return plan.to(x), distance.to(x)


def interpolate_along(x: Tensor, x2: Tensor, plan: Tensor, support: int, t: float) -> Tensor:
    """Interpolate between two sets of points along a plan (eq. 6).

    Args:
        x: the points of the first set, ``[m, d]``.
        x2: the points of the second set, ``[m2, d]``.
        plan: the plan between the two sets, ``[m, m2]``.
        support: m: move each point of ``x`` towards the mean of its partners in ``x2``; m2: move each point of ``x2``
            towards the mean of its partners in ``x``.
        t: the position between ``x`` (0) and ``x2`` (1).

    Returns:
        The interpolated points, ``[support, d]``.
    """
    if support == len(x):
        return torch.lerp(x, len(x) * (plan @ x2), t)
    return torch.lerp(len(x2) * (plan.T @ x), x2, t)
