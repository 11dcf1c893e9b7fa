"""Spread of a client's values over rounds, as running sums, and the standard error of their weighted sum.

A metric's value is a weighted sum of what single rounds said: a sum, a mean, a moving average. Were the rounds redrawn
in blocks with replacement (Künsch, "The jackknife and the bootstrap for general stationary observations", Annals of
Statistics 17, 1989), the variance of their mean would be, in the limit of many draws, the mean square of the blocks'
deviations. So nothing is drawn here: the sums of the blocks are folded as they come in, which takes the same memory
after any number of rounds, is the same in every run, and goes on after a restart.

Blocks do not overlap. The j-th has floor(sqrt(j)) rounds, so that of T rounds the last is about T^(1/3) long, the
length of least error (Hall, Horowitz and Jing, Biometrika 82, 1995), without T being known. Rounds are a client's own:
those in which it took part.

What rounds add to a *sum* falls or rises in the course of training, most of all in the first rounds. That is the sum
itself, not its error, and deviations from the rounds' mean would count it. So a sum's error is of the differences of a
client's successive rounds, half their mean square (von Neumann, Kent, Bellinson and Hart, "The mean square successive
difference", Annals of Mathematical Statistics 12, 1941), in which of a trend only its steps are left. It takes
successive rounds' swings for independent of each other.

A client's row is

    count | first | total | squares | cross | lengths | blocks | open total | open length | factors | last | steps

with the values of ``total`` to ``open total`` taken relative to the ``first``, so that nothing is lost where they
differ little; of the closed blocks the sums of S^2, S L and L^2, of values S over L rounds; the block that is still
open; the sum of the squared factors that the rounds have in the value; and the sum of the squared differences of
successive rounds up to the ``last``.
"""

from __future__ import annotations

import torch
from torch import Tensor

WIDTH = 12


def spread_add(
    rows: Tensor, client_ids: Tensor, values: Tensor, factor: float | Tensor = 1.0, keep: float | Tensor = 1.0
) -> Tensor:
    """The rows ``[n, 12]`` after one more round.

    Args:
        rows: zeros at first.
        client_ids: ``[k]`` of the cohort.
        values: ``[k]``, what the round alone says.
        factor: of the round in the value: 1 in a sum.
        keep: what the factors of the rounds before are multiplied by: 1 in a sum.

    Example:
        >>> rows = torch.zeros(2, WIDTH)
        >>> for value in (1.0, 3.0, 2.0):
        ...     rows = spread_add(rows, torch.tensor([1]), torch.tensor([value]))
        >>> spread_variance(rows)[0]  # of 1, 3 and 2, blocks of one
        tensor([nan, 1.])
    """
    rows = rows.clone()
    rows[client_ids] = _added(rows[client_ids], values.to(rows), factor, keep)
    return rows


def spread_merge(stretches: Tensor) -> Tensor:
    """Rows of successive stretches of rounds ``[W, n, 12]``, earliest first, as one ``[n, 12]``.

    A stretch of one round joins the earlier one's open block; before a longer one that block is closed.
    """
    merged = stretches[0]
    for later in stretches[1:]:
        joined = torch.where(later[:, :1] == 1, _added(merged, later[:, 1], later[:, 9] ** 0.5), _merged(merged, later))
        joined = torch.where(later[:, :1] == 0, merged, joined)
        merged = torch.where(merged[:, :1] == 0, later, joined)
    return merged


def spread_variance(rows: Tensor) -> tuple[Tensor, Tensor]:
    """The long-run variance of a round's value ``[n]``, which is T times the variance of the mean of T rounds, and the
    number of blocks ``[n]``. NaN below two blocks."""
    count, _, total, squares, cross, lengths, blocks, *_ = _closed(rows).unbind(-1)
    mean = total / count.clamp_min(1)
    deviations = (squares - 2 * mean * cross + mean.square() * lengths).clamp_min(0)
    variance = deviations / count.clamp_min(1) * blocks / (blocks - 1)
    return variance.masked_fill(blocks < 2, float("nan")), blocks


def step_variance(rows: Tensor) -> tuple[Tensor, Tensor]:
    """The variance of a round's value about its trend ``[n]``, from the differences of successive rounds, and its
    degrees of freedom ``[n]``: 2 m^2 / (3 m - 1) of m differences, each of which has a round in common with the next.
    NaN below two rounds.

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
    """With the open block closed."""
    count, first, total, squares, cross, lengths, blocks, s, length, *others = rows.unbind(-1)
    none = torch.zeros_like(s)
    sums = (squares + s.square(), cross + s * length, lengths + length.square(), blocks + (length > 0))
    return torch.stack([count, first, total, *sums, none, none, *others], dim=-1)


def _added(rows: Tensor, values: Tensor, factor: float | Tensor, keep: float | Tensor = 1.0) -> Tensor:
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
