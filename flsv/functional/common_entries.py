"""Common entries: the columns of a matrix in which all rows agree.

A weighted average of k equal numbers should be that number, but because of rounding it may be the next floating-point
number. Weights that no client trains, and constant buffers, would then drift from round to round. The functions here
find the columns in which all models agree, and restore these columns' exact values in an average.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

#: Columns per block: on a CPU few, so that a block fits the cache; on other devices many, since each block costs a
#: kernel launch.
_BLOCK = 2**16
_DEVICE_BLOCK = 2**22


def common_entries(rows: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Find the columns in which all rows ``[k, P]`` are equal. Yield ``(slice of columns, mask)``, block by block."""
    width = _BLOCK if rows.device.type == "cpu" else _DEVICE_BLOCK
    for begin in range(0, rows.shape[1], width):
        block = slice(begin, min(begin + width, rows.shape[1]))
        first = rows[0, block]
        same = first == first  # all but NaN
        if (
            rows.device.type != "cpu"
        ):  # to leave out rows or blocks, the host would wait for the device
            for row in rows[1:]:
                same &= row[block] == first
            yield block, same
            continue
        for row in rows[1:]:
            if torch.equal(row[block], first):
                continue
            same &= row[block] == first
            if not same.any():
                break
        else:
            if same.any():
                yield block, same


def keep_common(average: Tensor, rows: Tensor) -> Tensor:
    """Undo rounding in an average ``[..., P]``, in place: where all ``rows [k, P]`` are equal, it gets their value."""
    for block, same in common_entries(rows):
        average[..., block] = rows[0, block].where(same, average[..., block])
    return average
