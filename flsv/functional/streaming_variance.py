"""Streaming variance: the spread of a client's values over rounds, from running sums.

A metric's value is a weighted sum of the values of single rounds: a sum, a mean, a moving average. The block bootstrap
(Künsch, "The jackknife and the bootstrap for general stationary observations", Annals of Statistics 17, 1989) resamples
blocks of rounds with replacement; in the limit of many draws, its variance of the mean is the mean square of the
blocks' deviations. This limit is computed here from sums over blocks, which are updated round by round: that takes
constant memory, is deterministic, and continues after a restart.

Blocks do not overlap. Block j has floor(sqrt(j)) rounds. The last block of T rounds is then about T^(1/3) long, which
has the least error (Hall, Horowitz and Jing, Biometrika 82, 1995), although T is not known in advance. For each client
only the rounds in which it took part count.

The state is one row of 12 numbers per client,

    count | first | total | squares | cross | lengths | blocks | open total | open length | factors | last | steps

- ``count``: the number of rounds; ``first`` and ``last``: the values of the first and the last round.
- ``total``: the sum of the values. It and all sums over blocks are of values minus ``first``, against cancellation.
- ``squares``, ``cross`` and ``lengths``: the sums of S^2, S L and L^2 over the closed blocks, where S is the sum of a
  block's values and L its number of rounds; ``blocks``: the number of closed blocks.
- ``open total`` and ``open length``: S and L of the block that is not complete.
- ``factors``: the sum of the squared factors of the rounds in the metric's value.
- ``steps``: the sum of the squared differences between the values of successive rounds.
"""

from __future__ import annotations

import torch
from torch import Tensor

WIDTH = 12


def spread_add(
    rows: Tensor, client_ids: Tensor, values: Tensor, factor: float | Tensor = 1.0, keep: float | Tensor = 1.0
) -> Tensor:
    """Add one more round to the clients' rows of running sums.

    Args:
        rows: one row of running sums per client, ``[n, 12]``, zeros before the first round.
        client_ids: the indices of the k clients in the round, ``[k]``.
        values: these clients' values of this round alone, ``[k]``.
        factor: the weight of this round's values in the metric's value, such as 1 in a sum.
        keep: the number by which the weights of earlier rounds are multiplied, such as 1 in a sum.

    Returns:
        The new rows, ``[n, 12]``.

    Example:
        >>> rows = torch.zeros(2, WIDTH)
        >>> for value in (1.0, 3.0, 2.0):
        ...     rows = spread_add(rows, torch.tensor([1]), torch.tensor([value]))
        >>> spread_variance(rows)[0]  # the values 1, 3 and 2, in blocks of one round
        tensor([nan, 1.])
    """
    rows = rows.clone()
    rows[client_ids] = _added(rows[client_ids], values.to(rows), factor, keep)
    return rows


def spread_merge(stretches: Tensor) -> Tensor:
    """Merge the clients' rows of running sums from successive periods of rounds.

    A client's rounds are divided into blocks, the last of which is open, that is incomplete. A period of one round is
    added to the open block of the earlier periods; before a longer period, which has its own blocks, that block ends.

    Args:
        stretches: the rows of W periods, ``[W, n, 12]``, earliest first.

    Returns:
        The merged rows, ``[n, 12]``.
    """
    merged = stretches[0]
    for later in stretches[1:]:
        joined = torch.where(later[:, :1] == 1, _added(merged, later[:, 1], later[:, 9] ** 0.5), _merged(merged, later))
        joined = torch.where(later[:, :1] == 0, merged, joined)
        merged = torch.where(merged[:, :1] == 0, later, joined)
    return merged


def spread_variance(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the long-run variance of each client's single-round values.

    It is T times the variance of the mean of T rounds' values.

    Args:
        rows: the clients' running sums, ``[n, 12]``, see :func:`spread_add`.

    Returns:
        The variances ``[n]``, NaN with fewer than two blocks of rounds, and the numbers of blocks ``[n]``.
    """
    count, _, total, squares, cross, lengths, blocks, *_ = _closed(rows).unbind(-1)
    mean = total / count.clamp_min(1)
    deviations = (squares - 2 * mean * cross + mean.square() * lengths).clamp_min(0)
    variance = deviations / count.clamp_min(1) * blocks / (blocks - 1)
    return variance.masked_fill(blocks < 2, float("nan")), blocks


def step_variance(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the variance of each client's single-round values about their trend, from successive differences.

    It is for metrics that *sum* the rounds' values. These values fall or rise in the course of training, most of all in
    the first rounds. Such a trend is not an error of the sum, but deviations from the mean would count it as one. The
    variance is therefore half the mean square of the differences between successive rounds, which a slow trend hardly
    changes (von Neumann, Kent, Bellinson and Hart, "The mean square successive difference", Annals of Mathematical
    Statistics 12, 1941). It assumes that the values of successive rounds vary independently about the trend.

    Args:
        rows: the clients' running sums, ``[n, 12]``, see :func:`spread_add`.

    Returns:
        The variances ``[n]``, NaN with fewer than two rounds, and their degrees of freedom ``[n]``: 2 m^2 / (3 m - 1)
        for m differences, each of which shares a round with the next.

    Example:
        >>> rows = torch.zeros(1, WIDTH)
        >>> for value in (1.0, 3.0, 2.0):
        ...     rows = spread_add(rows, torch.tensor([0]), torch.tensor([value]))
        >>> step_variance(rows)  # (2^2 + 1^2) / 2 / 2
        (tensor([1.2500]), tensor([1.6000]))
    """
    count, steps = rows[:, 0], rows[:, 11]
    differences = (count - 1).masked_fill(count < 2, float("nan"))
    return steps / differences / 2, 2 * differences.square() / (3 * differences - 1)


def _closed(rows: Tensor) -> Tensor:
    """Add each client's open block to its closed ones, and return the new rows ``[n, 12]``."""
    count, first, total, squares, cross, lengths, blocks, s, length, *others = rows.unbind(-1)
    none = torch.zeros_like(s)
    sums = (squares + s.square(), cross + s * length, lengths + length.square(), blocks + (length > 0))
    return torch.stack([count, first, total, *sums, none, none, *others], dim=-1)


def _added(rows: Tensor, values: Tensor, factor: float | Tensor, keep: float | Tensor = 1.0) -> Tensor:
    """Add a round's values ``[k]`` to the rows ``[k, 12]`` of its clients."""
    full = rows[:, 8] >= (rows[:, 6] + 1).sqrt().floor()
    rows = torch.where(full[:, None], _closed(rows), rows)
    count, first, total, squares, cross, lengths, blocks, s, length, factors, last, steps = rows.unbind(-1)
    steps = steps + (values - last).square() * (count > 0)
    first = torch.where(count > 0, first, values)
    value = values - first
    factors = factors * keep**2 + factor**2
    open_ = (s + value, length + 1)
    closed = (squares, cross, lengths, blocks)
    return torch.stack([count + 1, first, total + value, *closed, *open_, factors, values, steps], dim=-1)


def _merged(earlier: Tensor, later: Tensor) -> Tensor:
    """Merge the clients' rows ``[n, 12]`` of a later period into those of an earlier one."""
    count, first, total, squares, cross, lengths, blocks, _, _, factors, last, steps = _closed(earlier).unbind(-1)
    c, f, t, q, x, d, b, s, length, more, end, further = later.unbind(-1)
    shift = f - first  # the later's values are relative to its own first
    sums = (
        count + c,
        first,
        total + t + c * shift,
        squares + q + 2 * shift * x + shift.square() * d,
        cross + x + shift * d,
        lengths + d,
        blocks + b,
        s + length * shift,
        length,
        factors + more,
        end,
        steps + (f - last).square() + further,
    )
    return torch.stack(sums, dim=-1)
