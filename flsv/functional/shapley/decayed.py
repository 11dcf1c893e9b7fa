"""Combine the Shapley values of rounds into one value per client, with decaying weights.

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

import torch
from torch import Tensor

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
