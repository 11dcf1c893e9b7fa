"""Euclidean distances of models and samples, without overflow and without a second matrix.

The square of an entry above 1.8e19 is infinite in float32, so that the float32 norm of such an update is infinite. In
float64 the squares of all float32 numbers are finite.
"""

from __future__ import annotations

import torch
from torch import Tensor

#: Numbers that are converted to float64 at a time: on a CPU as many as stay in its cache.
BLOCK, CPU_BLOCK = 1 << 20, 1 << 18


def distances(points: Tensor, origin: Tensor) -> Tensor:
    """Compute Euclidean distances in float64.

    Args:
        points: ``[k, P]``.
        origin: ``[P]``, the point from which all distances are measured, or ``[k, P]``, one per row.

    Returns:
        float64 ``[k]``; NaN for rows that hold NaN.

    Example:
        >>> distances(torch.tensor([[3e30, 4e30], [0.0, 0.0]]), torch.zeros(2))
        tensor([5.0000e+30, 0.0000e+00], dtype=torch.float64)
    """
    count, length = points.shape
    # Whole rows, as many as fit, or pieces of one: what lies together in memory is read together. One piece of memory
    # for all of them: new ones, some thousand times, would leave the heap in shreds as large as a second matrix.
    at_once = _at_once(points)
    rows, width = max(1, at_once // max(1, length)), min(at_once, max(1, length))
    scratch = torch.empty(min(rows, count), width, dtype=torch.float64, device=points.device)
    total = torch.zeros(count, dtype=torch.float64, device=points.device)
    origins = origin.expand_as(points)
    for top in range(0, count, rows):
        for left in range(0, length, width):
            block = points[top : top + rows, left : left + width]
            steps = scratch[: block.shape[0], : block.shape[1]].copy_(block)
            steps -= origins[top : top + rows, left : left + width]
            so_far = total[top : top + rows]
            torch.hypot(so_far, _lengths(steps, points.dtype == torch.float64), out=so_far)
    return total


def all_finite(vector: Tensor) -> bool:
    """Check that no entry of a vector is infinite or NaN, without a second vector in memory.

    Args:
        vector: ``[P]``.

    Example:
        >>> all_finite(torch.tensor([3e38, 3e38])), all_finite(torch.tensor([1.0, float("nan")]))
        (True, False)
    """
    # If the sum is finite all entries are; an infinite sum may come from finite entries.
    return bool(vector.sum().isfinite()) or all(bool(part.isfinite().all()) for part in vector.split(_at_once(vector)))


def _at_once(points: Tensor) -> int:
    """Return how many numbers are converted to float64 at a time."""
    return CPU_BLOCK if points.device.type == "cpu" else BLOCK


def _lengths(steps: Tensor, scale: bool) -> Tensor:
    """Compute the lengths ``[r]`` of rows ``[r, W]``, which are overwritten.

    ``scale``: divide each row by its largest entry first, since squares of float64 entries may overflow, too.
    """
    if not scale:
        return torch.linalg.vector_norm(steps, dim=-1)
    largest = torch.linalg.vector_norm(steps, float("inf"), dim=-1)
    steps /= largest.where(largest > 0, 1.0)[:, None]
    return torch.linalg.vector_norm(steps, dim=-1) * largest


def weighted_mean(points: Tensor, weights: Tensor) -> Tensor:
    """Compute sum_i weights_i points_i in float64.

    Args:
        points: ``[k, P]``.
        weights: ``[k]``.

    Returns:
        float64 ``[P]``.

    Example:
        >>> weighted_mean(torch.tensor([[1.0, 3e38], [3.0, 3e38]]), torch.tensor([0.5, 0.5]))
        tensor([2.0000e+00, 3.0000e+38], dtype=torch.float64)
    """
    count, length = points.shape
    width = min(max(1, _at_once(points) // max(1, count)), max(1, length))
    scratch = torch.empty(count, width, dtype=torch.float64, device=points.device)
    result = torch.empty(length, dtype=torch.float64, device=points.device)
    for left in range(0, length, width):
        block = points[:, left : left + width]
        torch.mv(scratch[:, : block.shape[1]].copy_(block).T, weights.double(), out=result[left : left + width])
    return result


def squared_distances(x: Tensor, x2: Tensor) -> Tensor:
    """Compute squared Euclidean distances float64 ``[m, m2]`` of ``[m, d]`` and ``[m2, d]``; equal rows are at exactly
    0."""
    left, right = x.double(), x2.double()
    origin = right.mean(0)  # Near the origin the three terms below cancel least.
    left, right = left - origin, right - origin
    norms = left.square().sum(1)[:, None] + right.square().sum(1)
    result = torch.addmm(norms, left, right.T, alpha=-2)
    # Results below the rounding error of the three terms count as 0: their sqrt would be some 1e-7.
    return result.masked_fill_(result <= 1e-13 * norms, 0.0)
