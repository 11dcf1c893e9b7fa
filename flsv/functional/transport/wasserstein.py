"""Exact optimal transport between samples: distances, contribution shares, and points on the Wasserstein geodesic.

Li et al., "Data Valuation and Detections in Federated Learning" (FedBary), CVPR 2024, equations 1 and 6, definition 4
and section 4.2, after Rakotomamonjy et al., "Federated Wasserstein Distance", ICLR 2024.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from flsv.functional.distances import squared_distances
from flsv.functional.transport.checks import Exponent, Place, check_pair
from flsv.functional.transport.cost import Covariance, label_augmented_cost
from flsv.utilities.declared import NonNegative, checked
from flsv.utilities.errors import ConfigurationError

# POT's default of 100 000 pivots is too few from about 2000 samples on either side.
MAX_PIVOTS = 100_000_000


@checked
def wasserstein_distance(
    x: Tensor,
    x2: Tensor,
    *,
    y: Tensor | None = None,
    y2: Tensor | None = None,
    p: Exponent = 2,
    covariance: Covariance = "diag",
    label_weight: NonNegative = 1.0,
) -> Tensor:
    """Compute the Wasserstein distance between two sets of equally heavy samples.

        W_p = (min over plans pi of sum_ij pi_ij d_ij^p)^(1/p)

    with d_ij the square root of :func:`label_augmented_cost` between samples i and j.

    Args:
        x: the samples of the first set, ``[m, d]``.
        x2: the samples of the second set, ``[m2, d]``.
        y: the integer classes of ``x``, ``[m]``. If ``y`` or ``y2`` is None, labels do not enter the cost.
        y2: the integer classes of ``x2``, ``[m2]``.
        p: the exponent of the distances, at least 1.
        covariance: see :func:`label_augmented_cost`.
        label_weight: see :func:`label_augmented_cost`.

    Returns:
        A scalar in feature units, in the dtype of ``x``. Exactly 0 between equal sets.

    Raises:
        ConfigurationError: samples or labels are empty, not finite or of wrong shapes, or an option is out of range.

    Example:
        >>> wasserstein_distance(torch.tensor([[0.0], [1.0]]), torch.tensor([[4.0], [3.0]]))
        tensor(3.)
        >>> wasserstein_distance(torch.tensor([[0.0]]), torch.tensor([[4.0], [2.0]]), p=1)
        tensor(3.)
    """
    cost = label_augmented_cost(x, y, x2, y2, covariance=covariance, label_weight=label_weight)
    return transport_plan(cost, p)[1]


def transport_plan(squared: Tensor, p: float) -> tuple[Tensor, Tensor]:
    """Compute an optimal plan ``[m, m2]`` between equally heavy points, and W_p, from squared distances."""
    import ot  # here, since it imports scikit-learn and pandas, which most formulas do not need

    cost = squared.detach().cpu().double().numpy()
    cost = cost if p == 2 else cost ** (p / 2)
    masses = [np.full(count, 1 / count) for count in cost.shape]
    plan = ot.emd(*masses, cost, numItermax=MAX_PIVOTS)
    value = max(float((plan * cost).sum()), 0.0) ** (1 / p)
    return torch.from_numpy(plan).to(squared), squared.new_tensor(value)


def contribution_shares(distances: Tensor) -> Tensor:
    """Compute clients' contribution shares, which are inversely proportional to their distances.

        (1/W_i) / sum_j (1/W_j)    for the distance W_i of client i

    Args:
        distances: the clients' distances, ``[n]``, at least 0 (possibly inf). NaN for a client without a distance.

    Returns:
        The shares, ``[n]``, which sum to 1. NaN for clients without a distance, which are left out. If some clients
        have distance 0, they have equal shares and all others 0.

    Raises:
        ConfigurationError: a distance is negative, or ``distances`` is not a vector.

    Example:
        >>> contribution_shares(torch.tensor([1.0, 2.0, float("nan"), 2.0]))
        tensor([0.5000, 0.2500,    nan, 0.2500])
        >>> contribution_shares(torch.tensor([0.0, 2.0, 0.0]))
        tensor([0.5000, 0.0000, 0.5000])
    """
    if distances.ndim != 1 or bool((distances < 0).any()):
        raise ConfigurationError(f"distances: expected a vector of numbers of at least 0, got {distances}.")
    seen = ~distances.isnan()
    nearest = distances[seen].min() if seen.any() else distances.new_zeros(())
    # Relative to the smallest distance, so that 1/1e-300 does not overflow; 0/0 and inf/inf are ties with the smallest.
    share = torch.where(distances == nearest, torch.ones_like(distances), nearest / distances)
    share = share.where(seen, torch.full_like(distances, torch.nan))
    return share / share[seen].sum()


@checked
def interpolating_measure(x: Tensor, x2: Tensor, *, t: Place = 0.5, p: Exponent = 2) -> Tensor:
    """Move each point of ``x`` towards the mean of its partners in ``x2`` (eq. 6).

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
    """Compute the optimal plan ``[m, m2]`` between two sets of equally heavy points, and W_p."""
    plan, distance = transport_plan(squared_distances(x, x2), p)
    return plan.to(x), distance.to(x)


def interpolate_along(x: Tensor, x2: Tensor, plan: Tensor, support: int, t: float) -> Tensor:
    """Move the ``support`` points of one set towards the means of their partners in the other (eq. 6)."""
    # With equally many points the plan is a permutation, and the result the geodesic itself (McCann). Otherwise it is
    # a barycentric projection, which stays near it and averages m/S samples into a point.
    if support == len(x):
        return torch.lerp(x, len(x) * (plan @ x2), t)
    return torch.lerp(len(x2) * (plan.T @ x), x2, t)
