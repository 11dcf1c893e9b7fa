"""Exponential moving averages per client, stored so that two of them can be merged exactly.

Two moving averages whose first value counts in full cannot be merged from their values alone. The state of a client
with M values is therefore the row of 2 M + 1 numbers

    first [M] | average [M] | seen [1]

where ``first`` is the first value, ``average`` the moving average started at zero, and ``seen`` the number of values in
it. With the momentum mu the moving average after c values is ``mu^c * first + average``. To merge the row of a later
period, ``average`` is multiplied by mu^(``seen`` of the later row), and ``average`` of the later row is added.
"""

from __future__ import annotations

import torch
from torch import Tensor


def momentum_row(values: Tensor, momentum: float) -> Tensor:
    """Make clients' state rows ``[k, 2M+1]`` from first values ``[k, M]``. A row has the first value, the average
    started at 0, and the number of values.
    """
    return torch.cat([values, (1 - momentum) * values, torch.ones_like(values[:, :1])], dim=-1)


def momentum_merge(rows: Tensor, momentum: float) -> Tensor:
    """Merge the n clients' state rows ``[W, n, 2M+1]`` of W successive periods, earliest first, to ``[n, 2M+1]``."""
    merged = rows[0]
    width = (merged.shape[-1] - 1) // 2
    for later in rows[1:]:
        seen = later[:, -1:]
        first = torch.where(merged[:, -1:] > 0, merged[:, :width], later[:, :width])
        average = momentum**seen * merged[:, width:-1] + later[:, width:-1]
        merged = torch.cat([first, average, merged[:, -1:] + seen], dim=-1)
    return merged


def momentum_add(rows: Tensor, client_ids: Tensor, values: Tensor, momentum: float) -> Tensor:
    """Add a round's values ``[k, M]`` to the n clients' state rows ``[n, 2M+1]``."""
    now = torch.zeros_like(rows)
    now[client_ids] = momentum_row(values.to(rows), momentum)
    return momentum_merge(torch.stack([rows, now]), momentum)


def momentum_value(rows: Tensor, momentum: float, init: float | None = None) -> Tensor:
    """Compute moving averages ``[n, M]`` from state rows, started at ``init`` or at the first value. NaN without a
    value.
    """
    width = (rows.shape[-1] - 1) // 2
    seen = rows[:, -1:]
    start = rows[:, :width] if init is None else init
    value = momentum**seen * start + rows[:, width:-1]
    return value.masked_fill(seen == 0, float("nan"))
