"""Euclidean distances of models and samples, without overflow and without a second matrix.

They are computed in float64 for two reasons. The square of an entry above 1.8e19 is infinite in float32, but finite in
float64. And float32 loses digits: on a CPU, torch's norm of an update of 10^5 entries is off by 3e-7 to 3e-6, of 10^7
entries by 6e-5 to 4e-4. Float64 costs little time, even on GPUs that are slow in it: an entry takes three operations,
while some 40 bytes are read and written, so that memory bandwidth is the limit.
"""

from __future__ import annotations

import torch
from torch import Tensor

#: The number of entries converted to float64 at a time: on an accelerator, and on a CPU, where they have to fit the
#: cache.
BLOCK, CPU_BLOCK = 1 << 20, 1 << 18


def distances(points: Tensor, origin: Tensor) -> Tensor:
    """Compute Euclidean distances of points ``[k, P]`` from an origin, float64 ``[k]``. The origin is ``[P]``, or
    ``[k, P]``.
    """
    count, length = points.shape
    # A block is as many whole rows as fit, or a piece of one row, so that memory is read in its order. One buffer is
    # used for all blocks: allocating thousands would fragment the heap by as much as a second matrix.
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
    """Return whether all entries of a vector are finite, without a second vector in memory."""
    # If the sum is finite all entries are; an infinite sum may come from finite entries.
    return bool(vector.sum().isfinite()) or all(
        bool(part.isfinite().all()) for part in vector.split(_at_once(vector))
    )


def _at_once(points: Tensor) -> int:
    """Return how many entries of ``points`` to convert to float64 at a time."""
    return CPU_BLOCK if points.device.type == "cpu" else BLOCK


def _lengths(steps: Tensor, scale: bool) -> Tensor:
    if not scale:
        return torch.linalg.vector_norm(steps, dim=-1)
    largest = torch.linalg.vector_norm(steps, float("inf"), dim=-1)
    steps /= largest.where(largest > 0, 1.0)[:, None]
    return torch.linalg.vector_norm(steps, dim=-1) * largest


def weighted_mean(points: Tensor, weights: Tensor) -> Tensor:
    """Compute sum_i weights_i points_i, float64 ``[P]``, for points ``[k, P]``. Weights are not normalized."""
    count, length = points.shape
    width = min(max(1, _at_once(points) // max(1, count)), max(1, length))
    scratch = torch.empty(count, width, dtype=torch.float64, device=points.device)
    result = torch.empty(length, dtype=torch.float64, device=points.device)
    for left in range(0, length, width):
        block = points[:, left : left + width]
        torch.mv(
            scratch[:, : block.shape[1]].copy_(block).T,
            weights.double(),
            out=result[left : left + width],
        )
    return result


def squared_distances(x: Tensor, x2: Tensor) -> Tensor:
    """Compute squared Euclidean distances between the points ``x [m, d]`` and ``x2 [m2, d]``.

    Returns:
        float64 ``[m, m2]``. Exactly 0 for equal rows.
    """
    left, right = x.double(), x2.double()
    origin = right.mean(0)  # Near the origin the three terms below cancel least.
    left, right = left - origin, right - origin
    norms = left.square().sum(1)[:, None] + right.square().sum(1)
    result = torch.addmm(norms, left, right.T, alpha=-2)
    # Results below the rounding error of the three terms count as 0: their sqrt would be some 1e-7.
    return result.masked_fill_(result <= 1e-13 * norms, 0.0)
