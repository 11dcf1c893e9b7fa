"""The columns of a matrix in which all rows agree.

A weighted average of k equal numbers is that number, in mathematics; with weights that are rounded it is one next to
it. Weights that nobody trains, and constant buffers, would drift from round to round. Here they are found, so that they
can be put back.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

#: Columns that fit a core's cache; on other devices a block is a launch of kernels.
_BLOCK = 2**16


_DEVICE_BLOCK = 2**22


def common_entries(rows: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Blocks of columns, and where in them all rows are equal. Blocks without any such column are left out.

    Where models differ everywhere, as after training, this looks at two rows only.

    Args:
        rows: ``[k, P]``, k at least 1.

    Yields:
        A slice of columns, and bool ``[width]``.

    Example:
        >>> [(block, same.tolist()) for block, same in common_entries(torch.tensor([[1.0, 2.0], [1.0, 3.0]]))]
        [(slice(0, 2, None), [True, False])]
    """
    width = _BLOCK if rows.device.type == "cpu" else _DEVICE_BLOCK
    for begin in range(0, rows.shape[1], width):
        block = slice(begin, min(begin + width, rows.shape[1]))
        first = rows[0, block]
        same = first == first  # all but NaN
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
    """Averages ``[..., P]`` of the rows ``[k, P]``, changed in place: where all rows agree they are what those are.

    Example:
        >>> rows = torch.tensor([[0.1], [0.1]])
        >>> keep_common(torch.tensor([0.1000001]), rows).equal(rows[0])
        True
    """
    for block, same in common_entries(rows):
        average[..., block] = rows[0, block].where(same, average[..., block])
    return average
