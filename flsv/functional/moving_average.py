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
    """Make the state rows of k clients from their values in a single round.

    Args:
        values: the clients' values in the round, ``[k, M]``.
        momentum: the momentum mu of the moving average.

    Returns:
        ``[k, 2M+1]``, one row per client: its first value ``[M]``, its moving average started at 0 ``[M]``, and the
        number of its values, here 1.
    """
    return torch.cat([values, (1 - momentum) * values, torch.ones_like(values[:, :1])], dim=-1)


def momentum_merge(rows: Tensor, momentum: float) -> Tensor:
    """Merge the clients' state rows, see :func:`momentum_row`, from successive periods of rounds.

    Args:
        rows: the rows of W periods, ``[W, n, 2M+1]``, earliest first. A row without values changes nothing.
        momentum: the momentum mu of the moving average.

    Returns:
        The merged rows, ``[n, 2M+1]``.
    """
    merged = rows[0]
    width = (merged.shape[-1] - 1) // 2
    for later in rows[1:]:
        seen = later[:, -1:]
        first = torch.where(merged[:, -1:] > 0, merged[:, :width], later[:, :width])
        average = momentum**seen * merged[:, width:-1] + later[:, width:-1]
        merged = torch.cat([first, average, merged[:, -1:] + seen], dim=-1)
    return merged


def momentum_add(rows: Tensor, client_ids: Tensor, values: Tensor, momentum: float) -> Tensor:
    """Add one more round to the clients' state rows.

    Args:
        rows: the clients' rows, ``[n, 2M+1]``, see :func:`momentum_row`.
        client_ids: the indices of the clients in the round, ``[k]``.
        values: the clients' values in the round, ``[k, M]``.
        momentum: the momentum mu of the moving average.

    Returns:
        The new rows, ``[n, 2M+1]``.
    """
    now = torch.zeros_like(rows)
    now[client_ids] = momentum_row(values.to(rows), momentum)
    return momentum_merge(torch.stack([rows, now]), momentum)


def momentum_value(rows: Tensor, momentum: float, init: float | None = None) -> Tensor:
    """Compute the clients' moving averages from their state rows.

    Args:
        rows: the clients' rows, ``[n, 2M+1]``, see :func:`momentum_row`.
        momentum: the momentum mu of the moving average.
        init: the value from which all averages start; None: each starts from its first value.

    Returns:
        ``[n, M]``; NaN for clients without a value.

    Example:
        >>> rows = momentum_row(torch.tensor([[1.0], [1.0]]), 0.5)
        >>> later = momentum_row(torch.tensor([[0.0], [1.0]]), 0.5)
        >>> momentum_value(momentum_merge(torch.stack([rows, later]), 0.5), 0.5).squeeze(-1)
        tensor([0.5000, 1.0000])
    """
    width = (rows.shape[-1] - 1) // 2
    seen = rows[:, -1:]
    start = rows[:, :width] if init is None else init
    value = momentum**seen * start + rows[:, width:-1]
    return value.masked_fill(seen == 0, float("nan"))


def momentum_squares(count: Tensor, momentum: float, init: bool = False) -> Tensor:
    """Compute the sum of the squared weights that the values have in a moving average.

    The variance of a moving average of independent values is this sum times the variance of one value.

    Args:
        count: the number of values in each average, ``[n]``.
        momentum: the momentum mu of the moving average.
        init: whether the average starts from a constant; False: it starts from its first value.

    Returns:
        ``[n]``.

    Example:
        >>> momentum_squares(torch.tensor([1.0, 3.0]), 0.5)  # 1; 1/4, 1/4 and 1/2
        tensor([1.0000, 0.3750])
    """
    first = momentum ** (2 * (count - 1))
    others = (1 - momentum) ** 2 * (1 - first) / (1 - momentum**2)
    return others + first * ((1 - momentum) ** 2 if init else 1)
