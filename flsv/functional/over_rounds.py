"""What is folded over rounds: moving averages, lower bounds of means, and how much values swing.

An exponential moving average per client, kept so that two of them can be merged exactly.

A moving average whose first value counts in full cannot be merged from its value alone. Each client's row is therefore

    first [M] | average [M] | seen [1]

where ``average`` is the average started at zero and ``seen`` the number of values in it. After c values the running
value is ``mu^c * first + average``; a later row is appended by ``average <- mu^(seen of the later) * average + later``.

Lower confidence bounds of means over rounds.

Spread of a client's values over rounds, as running sums, and the standard error of their weighted sum.

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

Combines the Shapley values of rounds into one value per client, with decaying weights.

Guo et al., "A Fair Contribution Measurement Method for Federated Learning", Sensors 24(15), 2024, Algorithm 1, line 21:

    phi_i = sum_{t=1..R} omega^t phi_i(t) / sum_j phi_j(t).

Three baselines of the paper are settings of it, ``MULTI_ROUND_INDICES``, for a run of FedAvg:

- "SOR": the sum of the rounds' values as they are. Guo et al. (section 5.2) say that "the Shapley value for each
  participant is calculated at each training epoch" on sub-models rebuilt from gradients and that the results "are then
  aggregated"; how is not said, and they cite Song et al. for OR alone. The sum is the plainest reading, and that of
  Wang et al., "A Principled Approach to Data Valuation for Federated Learning", 2020, without weights of rounds;
- "MR": the sum of each client's share of every round's gain, the multi-round index of Song et al., "Profit Allocation
  for Federated Learning", IEEE Big Data 2019;
- "TMR": as MR with omega < 1, and rounds with omega^t below a threshold are left out, the truncated one of Wei et al.,
  "Efficient and Fair Data Valuation for Horizontal Federated Learning", 2020. Guo et al. say that TMR weighs rounds by
  their accuracy, too. That is not done: they give no formula (accuracy before or after the round, and what the weights
  are divided by), and to fill it in would be our own index under the name of theirs. Neither do they give omega and the
  threshold; with ours 10 rounds are evaluated.

Departures: the quotient has no meaning in a round that gains nothing or loses. A round in which nobody's value differs
from 0 is skipped; one whose values sum to nothing or less is divided by sum_j |phi_j|: with the literal formula a
client that did harm would be credited for it. What is left is that a round which gains 0.1 % counts as much as one that
gains 60 %, and that shares are unbounded where a small gain is the sum of values of both signs. Without the division
(``normalize=False``) the values are sum_t omega^t phi_i(t), in the unit of the utility.
"""

from __future__ import annotations

from typing import Annotated

import torch
from annotated_types import Ge, Lt
from scipy.special import ndtri, stdtrit
from torch import Tensor

from flsv.functional.shapley.game import t_quantile
from flsv.utilities.declared import checked

Confidence = Annotated[float, Ge(0.5), Lt(1)]


def momentum_row(values: Tensor, momentum: float) -> Tensor:
    """The rows of one round's values: ``[k, M]`` to ``[k, 2M+1]``."""
    return torch.cat([values, (1 - momentum) * values, torch.ones_like(values[:, :1])], dim=-1)


def momentum_merge(rows: Tensor, momentum: float) -> Tensor:
    """Rows of successive stretches of rounds, earliest first, as one: ``[W, n, 2M+1]`` to ``[n, 2M+1]``.

    A row whose ``seen`` is 0 is empty and changes nothing.
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
    """The rows ``[n, 2M+1]`` after one more round, whose values are ``[k, M]``."""
    now = torch.zeros_like(rows)
    now[client_ids] = momentum_row(values.to(rows), momentum)
    return momentum_merge(torch.stack([rows, now]), momentum)


def momentum_value(rows: Tensor, momentum: float, init: float | None = None) -> Tensor:
    """The running values of rows ``[n, 2M+1]``: ``[n, M]``, NaN where nothing was seen.

    With ``init`` the average starts there, instead of at its first value.

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


@checked
def lower_bound(
    count: Tensor, mean: Tensor, squares: Tensor, stderr: Tensor | None = None, confidence: Confidence = 0.9
) -> Tensor:
    r"""One-sided lower confidence bound of the mean of a few independent values.

    .. math:: \bar x - t_{c-1}(\text{confidence})\, s / \sqrt c, \qquad s^2 = \frac1{c-1} \sum (x - \bar x)^2

    with Student's t for c values. A single value has no spread: of it its own standard error is taken off, times the
    normal quantile.

    Args:
        count: ``[...]`` whole numbers, c; where it is 0 the bound is NaN.
        mean: ``[...]``.
        squares: ``[...]``, the sum of the squared deviations from the mean.
        stderr: ``[...]``, of single values; NaN and None count as 0.
        confidence: in [0.5, 1).

    Returns:
        float64 ``[...]``.

    Raises:
        ConfigurationError: confidence outside [0.5, 1).

    Example:
        >>> two_rounds = torch.tensor([2]), torch.tensor([0.5]), torch.tensor([0.02])
        >>> lower_bound(*two_rounds, confidence=0.9)
        tensor([0.1922], dtype=torch.float64)
    """
    count, mean, squares = count.cpu().double(), mean.cpu().double(), squares.cpu().double()
    freedom = (count - 1).clamp_min(1)
    quantile = torch.from_numpy(stdtrit(freedom.numpy(), confidence)).reshape(count.shape)
    spread = quantile * (squares.clamp_min(0) / freedom / count.clamp_min(1)).sqrt()
    error = torch.zeros_like(mean) if stderr is None else stderr.cpu().double().nan_to_num(0)
    bound = mean - torch.where(count > 1, spread, float(ndtri(confidence)) * error)
    return bound.masked_fill(count == 0, torch.nan)


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


def momentum_squares(count: Tensor, momentum: float, init: bool = False) -> Tensor:
    """The sum of the squared factors that ``count`` values have in their moving average, the first of which counts in
    full, or like the others where there is a start value.

    Example:
        >>> momentum_squares(torch.tensor([1.0, 3.0]), 0.5)  # 1; 1/4, 1/4 and 1/2
        tensor([1.0000, 0.3750])
    """
    first = momentum ** (2 * (count - 1))
    others = (1 - momentum) ** 2 * (1 - first) / (1 - momentum**2)
    return others + first * ((1 - momentum) ** 2 if init else 1)


def half_width(variance: Tensor, freedom: Tensor, level: float) -> Tensor:
    """Half of the interval at this level of a number of that variance ``[n]``, estimated with so many degrees of
    freedom, by Student's t. NaN without any.

    Example:
        >>> half_width(torch.tensor([4.0]), torch.tensor([10.0]), 0.9)
        tensor([3.6249])
    """
    return (t_quantile(level, freedom).to(variance) * variance.sqrt()).masked_fill(~(freedom > 0), float("nan"))


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


EPSILON = 1e-6
MULTI_ROUND_INDICES: dict[str, dict[str, float]] = {
    "SOR": {"decay": 1.0, "threshold": 0.0, "normalize": False},
    "MR": {"decay": 1.0, "threshold": 0.0},
    "TMR": {"decay": 0.8, "threshold": 0.1},
}


def round_factor(round_index: int, decay: float, threshold: float = 0.0) -> float:
    """decay^t with t = ``round_index`` + 1, or 0 where that is below the threshold: the round need not be evaluated."""
    factor = decay ** (round_index + 1)
    return factor if factor >= threshold else 0.0


def round_shares(values: Tensor, epsilon: float = EPSILON) -> tuple[Tensor, bool, bool]:
    """Each client's share of a round's gain.

    Args:
        values: ``[k]``, the round's Shapley values.
        epsilon: what counts as nothing, in the unit of the values.

    Returns:
        float64 ``[k]``; whether the round is skipped (all shares 0: the absolute values sum to less than ``epsilon``);
        and whether it is flagged (the values sum to less than ``epsilon``; their shares are of the absolute values).

    Example:
        >>> round_shares(torch.tensor([0.3, 0.1]))
        (tensor([0.7500, 0.2500], dtype=torch.float64), False, False)
        >>> round_shares(torch.tensor([-0.3, 0.1]))
        (tensor([-0.7500,  0.2500], dtype=torch.float64), False, True)
    """
    values = values.double()
    total, absolute = float(values.sum()), float(values.abs().sum())
    if absolute < epsilon:
        return torch.zeros_like(values), True, False
    flagged = total < epsilon
    return values / (absolute if flagged else total), False, flagged
