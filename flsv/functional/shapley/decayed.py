"""Decayed Shapley values: one value per client from the Shapley values of all rounds.

Guo et al., "A Fair Contribution Measurement Method for Federated Learning", Sensors 24(15), 2024, Algorithm 1, line 21.

Three baselines of the paper are settings of :func:`decayed_shapley` for a run of FedAvg, see ``MULTI_ROUND_INDICES``:

- "SOR": the sum of each client's Shapley values in all rounds. Guo et al. (section 5.2) say that "the Shapley value for
  each participant is calculated at each training epoch" on sub-models rebuilt from gradients and that the results "are
  then aggregated". They do not say how. The sum is the simplest reading. It is also the value of Wang et al., "A
  Principled Approach to Data Valuation for Federated Learning", 2020, without weights of rounds.
- "MR": the sum of each client's share of every round's gain, the multi-round index of Song et al., "Profit Allocation
  for Federated Learning", IEEE Big Data 2019.
- "TMR": like MR, but round t has the weight omega^t with omega < 1, and rounds whose weight is below a threshold are
  excluded: the truncated index of Wei et al., "Efficient and Fair Data Valuation for Horizontal Federated Learning",
  2020. According to Guo et al. TMR also weights rounds by their accuracy. They give no formula, so this is omitted.
  They give no omega and no threshold either. With the values chosen here the first 10 rounds are evaluated.
"""

from __future__ import annotations

from typing import Annotated

import torch
from annotated_types import Gt, Le
from torch import Tensor

from flsv.utilities.declared import NonNegative, checked
from flsv.utilities.errors import ConfigurationError

EPSILON = 1e-6
MULTI_ROUND_INDICES: dict[str, dict[str, float]] = {
    "SOR": {"decay": 1.0, "threshold": 0.0, "normalize": False},
    "MR": {"decay": 1.0, "threshold": 0.0},
    "TMR": {"decay": 0.8, "threshold": 0.1},
}


@checked
def decayed_shapley(
    values: Tensor,
    decay: Annotated[float, Gt(0), Le(1)] = 0.8,
    threshold: NonNegative = 0.0,
    normalize: bool = True,
) -> Tensor:
    r"""Sum up each client's shares of the rounds' gains, decayed.

    .. math:: \phi_i = \sum_{t=1}^{T} \omega^t \frac{\phi_i(t)}{\sum_j \phi_j(t)}

    with phi_i(t) the Shapley value of client i in round t of T. Departure: if a round's values sum to 0 or less, the
    quotient has no meaning and is replaced, see :func:`round_shares`. The formula has two drawbacks: a round that gains
    0.1 % counts as much as one that gains 60 %, and if values of both signs sum to a small gain, the shares are
    unbounded.

    Args:
        values: ``[T, n]``, the clients' Shapley values phi_i(t) of each round, in the unit of the utility. NaN for
            clients outside the round's cohort.
        decay: omega in (0, 1].
        threshold: rounds with omega^t below this number are excluded. At most ``decay``.
        normalize: whether to divide each round's values by their sum. False: the result is sum_t omega^t phi_i(t), in
            the unit of the utility.

    Returns:
        float64 ``[n]``. NaN for clients that are not in any round.

    Raises:
        ConfigurationError: ``decay`` or ``threshold`` is out of range.
        ValueError: ``values`` is not a matrix.

    Example:
        >>> rounds = torch.tensor([[0.3, 0.1, float("nan")], [0.1, 0.0, 0.1]])
        >>> decayed_shapley(rounds, decay=0.5)
        tensor([0.5000, 0.1250, 0.1250], dtype=torch.float64)
    """
    if values.ndim != 2:
        raise ValueError(
            f"expected values [T, n], one row per round, but got shape {list(values.shape)}."
        )
    if threshold > decay:
        raise ConfigurationError(
            f"decayed_shapley(threshold={threshold}, decay={decay}): no round counts if the threshold is above decay. "
            "Lower the threshold."
        )
    sums = values.new_full(values.shape[1:], torch.nan, dtype=torch.float64)
    for round_index, round_values in enumerate(values):
        factor = round_factor(round_index, decay, threshold)
        if factor > 0:
            _add_shares(sums, round_values, factor, normalize)
    return sums


def _add_shares(sums: Tensor, round_values: Tensor, factor: float, normalize: bool) -> None:
    """Add a round's shares to the ``sums [n]`` of the clients that took part. They are NaN before a first round."""
    took_part = ~round_values.isnan()
    shares = round_values[took_part].double()
    if normalize:
        shares, _is_skipped, _is_flagged = round_shares(shares)
    sums[took_part] = sums[took_part].nan_to_num() + factor * shares


def round_factor(
    round_index: int,
    decay: float,
    threshold: float = 0.0,
) -> float:
    """Compute decay^(``round_index`` + 1), or 0 if this is below the threshold."""
    factor = decay ** (round_index + 1)
    if factor < threshold:
        return 0.0
    return factor


def round_shares(values: Tensor) -> tuple[Tensor, bool, bool]:
    """Divide a round's values ``[k]`` by their sum. Also return whether the round is skipped (all values are 0) and
    whether it is flagged (their sum is not positive).
    """
    # If the values sum to 0 or less, they are divided by the sum of absolute values, since a division by their sum
    # would give positive shares to harmful clients.
    values = values.double()
    total = float(values.sum())
    absolute_total = float(values.abs().sum())
    is_skipped = absolute_total < EPSILON
    is_flagged = total < EPSILON and not is_skipped
    if is_skipped:
        shares = torch.zeros_like(values)
    elif is_flagged:
        shares = values / absolute_total
    else:
        shares = values / total
    return shares, is_skipped, is_flagged
