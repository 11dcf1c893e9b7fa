"""Euclidean distances of models and samples, without overflow and without a second matrix.

They are computed in float64 for two reasons. The square of a number above 1.8e19 is infinite in float32, but finite in
float64. And float32 loses digits: on a CPU, torch's norm of an update of 10^5 elements has an error of 3e-7 to 3e-6, of
10^7 elements 6e-5 to 4e-4. Float64 costs little time, even on GPUs that are slow in it: an element takes three
operations, while some 40 bytes are read and written, so that memory bandwidth is the limit.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.linalg import vector_norm

#: The number of elements converted to float64 at a time: on an accelerator, and on a CPU, where they have to fit the
#: cache.
BLOCK_SIZE = 1 << 20
CPU_BLOCK_SIZE = 1 << 18


def distances(points: Tensor, origin: Tensor) -> Tensor:
    """Compute Euclidean distances of points ``[k, P]`` from an origin, float64 ``[k]``. The origin is ``[P]``, or
    ``[k, P]``.
    """
    scratch = _scratch(points)
    is_double = points.dtype == torch.float64
    total_lengths = points.new_zeros(len(points), dtype=torch.float64)
    origins = origin.expand_as(points)
    for rows, columns in _blocks(points.shape, scratch.shape):
        block = points[rows, columns]
        height, width = block.shape
        steps = scratch[:height, :width]
        steps.copy_(block)
        steps -= origins[rows, columns]

        lengths = _row_lengths(steps, scale=is_double)
        # The parts of a row are orthogonal, so that their squared lengths add up.
        lengths_so_far = total_lengths[rows]
        torch.hypot(lengths_so_far, lengths, out=lengths_so_far)
    return total_lengths


def _scratch(points: Tensor) -> Tensor:
    # A block has as many whole rows as fit, or a part of one row.
    # Memory is read sequentially. One buffer is used for all blocks, since allocating thousands would fragment the
    # heap by as much as a second matrix.
    num_points, length = points.shape
    block_size = _block_size(points)
    width = min(block_size, max(1, length))
    rows_that_fit = block_size // width
    num_rows = max(1, min(rows_that_fit, num_points))
    return points.new_empty(num_rows, width, dtype=torch.float64)


def _blocks(
    shape: torch.Size,
    block_shape: torch.Size,
) -> Iterator[tuple[slice, slice]]:
    num_rows, width = block_shape
    for top in range(0, shape[0], num_rows):
        rows = slice(top, top + num_rows)
        for begin in range(0, shape[1], width):
            columns = slice(begin, begin + width)
            yield rows, columns


def all_finite(vector: Tensor) -> bool:
    """Return whether all elements of a vector are finite, without a second vector in memory."""
    # If the sum is finite, all elements are finite. An infinite sum may come from finite elements.
    if vector.sum().isfinite():
        return True
    block_size = _block_size(vector)
    parts = vector.split(block_size)
    are_finite = (part.isfinite().all() for part in parts)
    return all(are_finite)


def _block_size(points: Tensor) -> int:
    """Return how many elements of ``points`` to convert to float64 at a time."""
    if points.device.type == "cpu":
        return CPU_BLOCK_SIZE
    return BLOCK_SIZE


def _row_lengths(steps: Tensor, scale: bool) -> Tensor:
    if not scale:
        return vector_norm(steps, dim=-1)
    largest = vector_norm(steps, math.inf, dim=-1)
    divisors = largest.where(largest > 0, 1.0)
    divisors = divisors[:, None]
    steps /= divisors  # in place, since the caller does not read them again
    return vector_norm(steps, dim=-1) * largest


def weighted_mean(points: Tensor, weights: Tensor) -> Tensor:
    """Compute sum_i weights_i points_i, float64 ``[P]``, for points ``[k, P]``. Weights are not normalized."""
    num_points, length = points.shape
    weights = weights.double()
    mean = points.new_empty(length, dtype=torch.float64)
    # A block of columns [k, width] at a time is converted to float64, in the same memory.
    max_width = _block_size(points) // max(1, num_points)
    width = max(1, min(max_width, length))
    buffer = points.new_empty(num_points, width, dtype=torch.float64)
    for begin in range(0, length, width):
        columns = slice(begin, begin + width)
        block = points[:, columns]
        block_width = block.shape[1]
        converted = buffer[:, :block_width]
        converted.copy_(block)
        torch.mv(converted.T, weights, out=mean[columns])
    return mean


def squared_distances(x: Tensor, x2: Tensor) -> Tensor:
    """Compute squared Euclidean distances between the points ``x [m, d]`` and ``x2 [m2, d]``.

    Returns:
        float64 ``[m, m2]``. Exactly 0 for equal rows.
    """
    points = x.double()
    points2 = x2.double()
    # Centering reduces the cancellation of the three terms below.
    origin = points2.mean(0)
    points = points - origin
    points2 = points2 - origin

    # |a - b|^2 = |a|^2 + |b|^2 - 2 a . b, for all pairs [m, m2].
    squares = points.square().sum(1)
    squares2 = points2.square().sum(1)
    sums = squares[:, None] + squares2
    distances = torch.addmm(sums, points, points2.T, alpha=-2)

    # Results below the rounding error of the three terms are set to 0. Their square root would be about 1e-7.
    is_rounding = distances <= 1e-13 * sums
    return distances.masked_fill_(is_rounding, 0.0)
