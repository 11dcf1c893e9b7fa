"""Exponential moving averages per client, stored so that two of them can be merged exactly.

Two moving averages that start from the first value cannot be merged if only their results are known. The state of a
client with M values is therefore the row of 2 M + 1 numbers

    first [M] | average [M] | count [1]

where ``first`` is the first value, ``average`` the moving average started at zero, and ``count`` the number of values
in it. With the momentum mu the moving average after c values is ``mu^c * first + average``. To merge the row of a later
period, ``average`` is multiplied by mu^(``count`` of the later row), and ``average`` of the later row is added.
"""

from __future__ import annotations

import torch
from torch import Tensor


def momentum_row(values: Tensor, momentum: float) -> Tensor:
    """Return clients' state rows ``[k, 2M+1]`` for first values ``[k, M]``. A row has the first value, the average
    started at 0, and the number of values.
    """
    average = (1 - momentum) * values
    count = torch.ones_like(values[:, :1])
    return torch.cat([values, average, count], dim=-1)


def momentum_merge(rows: Tensor, momentum: float) -> Tensor:
    """Merge the n clients' state rows ``[W, n, 2M+1]`` of W successive periods, earliest first, to ``[n, 2M+1]``."""
    first_values, average, num_values = _split_rows(rows[0])
    for later_rows in rows[1:]:
        later_first_values, later_average, later_num_values = _split_rows(later_rows)
        first_values = torch.where(num_values > 0, first_values, later_first_values)
        # The averages start at 0, so that each later value multiplies the earlier average by the momentum.
        decay = momentum**later_num_values
        average = decay * average + later_average
        num_values = num_values + later_num_values
    return torch.cat([first_values, average, num_values], dim=-1)


def _split_rows(rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Split state rows into first values ``[..., M]``, averages ``[..., M]`` and numbers of values ``[..., 1]``."""
    width = rows.shape[-1] // 2
    first_values, average, num_values = rows.split([width, width, 1], dim=-1)
    return first_values, average, num_values


def momentum_add(
    rows: Tensor,
    client_ids: Tensor,
    values: Tensor,
    momentum: float,
) -> Tensor:
    """Add a round's values ``[k, M]`` to the n clients' state rows ``[n, 2M+1]``."""
    round_rows = torch.zeros_like(rows)
    round_rows[client_ids] = momentum_row(values.to(rows), momentum)
    periods = torch.stack([rows, round_rows])
    return momentum_merge(periods, momentum)


def momentum_value(
    rows: Tensor,
    momentum: float,
    init: float | None = None,
) -> Tensor:
    """Compute moving averages ``[n, M]`` from state rows, started at ``init`` or at the first value. NaN without a
    value.
    """
    first_values, average, num_values = _split_rows(rows)
    initial_values: Tensor | float = first_values
    if init is not None:
        initial_values = init
    value = momentum**num_values * initial_values + average
    return value.masked_fill(num_values == 0, torch.nan)
