"""Functions for the columns of a matrix in which all rows are equal.

A weighted average of k equal numbers should be that number, but because of rounding it may be the next floating-point
number. Weights that no client trains, and constant buffers, would then drift from round to round. These functions find
the columns in which all models are equal, and restore their exact values in an average.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

#: Columns per block. On a CPU a block fits the cache. On other devices blocks are larger, since each needs a kernel
#: launch.
_COLUMNS_PER_BLOCK = 2**16
_COLUMNS_PER_DEVICE_BLOCK = 2**22


def common_columns(rows: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Find the columns in which all rows ``[k, P]`` are equal. Yield ``(slice of columns, mask)``, block by block."""
    length = rows.shape[1]
    on_device = rows.device.type != "cpu"
    width = _COLUMNS_PER_DEVICE_BLOCK if on_device else _COLUMNS_PER_BLOCK
    for begin in range(0, length, width):
        end = min(begin + width, length)
        block = slice(begin, end)
        is_common = _is_common(rows[:, block], stops_early=not on_device)
        if on_device or is_common.any():  # on a device the host would wait for the test
            yield block, is_common


def _is_common(rows: Tensor, stops_early: bool) -> Tensor:
    """Return a mask of the columns in which all rows are equal, one bool per column."""
    # On the CPU most rows and blocks can be skipped. On a device the host would wait for each such test.
    first_row = rows[0]
    is_common = first_row == first_row  # False for NaN
    for row in rows[1:]:
        if stops_early and torch.equal(row, first_row):
            continue
        is_common &= row == first_row
        if stops_early and not is_common.any():
            break
    return is_common


def keep_common(average: Tensor, rows: Tensor) -> Tensor:
    """Set the columns of an average ``[..., P]`` in which all ``rows [k, P]`` are equal to their value, in place."""
    for block, is_common in common_columns(rows):
        common_values = rows[0, block]
        rounded = average[..., block]
        average[..., block] = common_values.where(is_common, rounded)
    return average
