"""Common entries: the columns of a matrix in which all rows agree.

A weighted average of k equal numbers is that number in mathematics; with rounded weights it may be the next
floating-point number. Weights that no client trains, and constant buffers, would then drift from round to round. The
functions here find the columns in which all models agree, and put their values back into an average.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

#: Columns per block on a CPU, whose cache they fit, and on other devices, where every block costs a kernel launch.
_BLOCK = 2**16
_DEVICE_BLOCK = 2**22


def common_entries(rows: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Find the columns in which all rows are equal, block by block.

    On a CPU blocks without such a column are left out, and if models differ everywhere, as after training, only two
    rows are compared.

    Args:
        rows: one model per row, ``[k, P]``, at least one.

    Yields:
        A block's slice of columns, and bool ``[width]``: True for columns in which all rows are equal.

    Example:
        >>> [(block, same.tolist()) for block, same in common_entries(torch.tensor([[1.0, 2.0], [1.0, 3.0]]))]
        [(slice(0, 2, None), [True, False])]
    """
    width = _BLOCK if rows.device.type == "cpu" else _DEVICE_BLOCK
    for begin in range(0, rows.shape[1], width):
        block = slice(begin, min(begin + width, rows.shape[1]))
        first = rows[0, block]
        same = first == first  # all but NaN
        if rows.device.type != "cpu":  # to leave out rows or blocks, the host would wait for the device
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
    """Set the entries of averages in which all averaged rows agree to the rows' common values.

    Args:
        average: the averages of the rows, ``[..., P]``, changed in place.
        rows: the averaged rows, ``[k, P]``.

    Returns:
        ``average``; its entries equal those of the rows to the bit if all rows agree.

    Example:
        >>> rows = torch.tensor([[0.1], [0.1]])
        >>> keep_common(torch.tensor([0.1000001]), rows).equal(rows[0])
        True
    """
    for block, same in common_entries(rows):
        average[..., block] = rows[0, block].where(same, average[..., block])
    return average
