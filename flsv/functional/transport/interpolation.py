"""Interpolating measures: points on the Wasserstein geodesic between two sets of samples.

Li et al., "Data Valuation and Detections in Federated Learning" (FedBary), CVPR 2024, definition 4 and equation 6,
after Rakotomamonjy et al., "Federated Wasserstein Distance", ICLR 2024 (arXiv 2310.01973).

With as many points on both sides the optimal plan is a permutation, and moving each point along it (McCann) is the
geodesic itself. With S points on one side only, each of them moves towards the mean of what it is matched with: a
barycentric projection, which stays near the geodesic and averages m/S samples into a point.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flsv.errors import ConfigurationError
from flsv.functional.transport._checks import check_pair, check_step
from flsv.functional.transport.exact import transport_plan
from flsv.functional.transport.statistics import squared_distances

FREE_SUPPORT_STEPS = 10


def interpolating_measure(
    x: Tensor,
    x2: Tensor,
    *,
    support: int | None = None,
    t: float = 0.5,
    p: float = 2,
    generator: torch.Generator | None = None,
    initial: Tensor | None = None,
) -> Tensor:
    """S equally heavy points at the place t on the way from ``x`` to ``x2``.

    Args:
        x: ``[m, d]`` samples, equally heavy.
        x2: ``[m2, d]``.
        support: S; None: m. S = m: the points of ``x`` move (eq. 6), exactly on the geodesic if m2 = m, too; S = m2:
            the points of ``x2`` do. Any other S: points drawn from the optimal plan, followed by 10 steps of the free-
            support barycentre of the two sides (Cuturi and Doucet, ICML 2014).
        t: 0 is ``x``, 1 is ``x2``.
        p: the exponent of the plan's cost.
        generator: draws the first points for such an S; None: torch's default.
        initial: ``[S, d]`` first points for such an S, instead of a draw.

    Returns:
        ``[S, d]`` in the dtype of ``x``.

    Raises:
        ConfigurationError: wrong samples, S, t or p.

    Example:
        >>> interpolating_measure(torch.tensor([[0.0], [1.0]]), torch.tensor([[5.0], [2.0]]), t=0.25)
        tensor([[0.5000],
                [2.0000]])
    """
    check_pair(x, x2)
    check_step(t, p)
    support = len(x) if support is None else support
    if support < 1:
        raise ConfigurationError(f"support={support}: a measure needs at least one point.")
    if support in (len(x), len(x2)):
        return interpolate_along(x, x2, matching(x, x2, p)[0], support, t)
    points = _draw(x, x2, support, t, p, generator) if initial is None else initial.to(x)
    if points.shape != (support, x.shape[1]):
        raise ConfigurationError(f"initial: expected [{support}, {x.shape[1]}], got {list(points.shape)}.")
    for _ in range(FREE_SUPPORT_STEPS):
        towards = support * (matching(points, x, p)[0] @ x), support * (matching(points, x2, p)[0] @ x2)
        points = torch.lerp(*towards, t)
    return points


def matching(x: Tensor, x2: Tensor, p: float) -> tuple[Tensor, Tensor]:
    """The optimal plan ``[m, m2]`` between two sets of points, and W_p."""
    plan, distance = transport_plan(squared_distances(x, x2), p=p)
    return plan.to(x), distance.to(x)


def interpolate_along(x: Tensor, x2: Tensor, plan: Tensor, support: int, t: float) -> Tensor:
    """Equation 6 on the side that has ``support`` points."""
    if support == len(x):
        return torch.lerp(x, len(x) * (plan @ x2), t)
    return torch.lerp(len(x2) * (plan.T @ x), x2, t)


def _draw(x: Tensor, x2: Tensor, support: int, t: float, p: float, generator: torch.Generator | None) -> Tensor:
    """Atoms of the exact interpolant, by their mass, as many as asked for."""
    rows, columns = (plan := matching(x, x2, p)[0]).nonzero(as_tuple=True)
    masses = plan[rows, columns].cpu()
    drawn = torch.multinomial(masses, support, replacement=support > len(masses), generator=generator).to(x.device)
    return torch.lerp(x[rows[drawn]], x2[columns[drawn]], t)
