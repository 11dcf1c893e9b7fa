"""Cosine gradient Shapley values (CGSV): reputations from how far each participant's update points with the aggregate.

Xu et al., "Gradient Driven Rewards to Guarantee Fairness in Collaborative Machine Learning", NeurIPS 2021, Algorithm 1:

    u_i = scale d_i / |d_i|,   u_N = sum_i r_i u_i,   phi_i = cos(u_i, u_N),   r_i <- alpha r_i + (1 - alpha) phi_i

and r is made to sum to 1. Lengths are taken as |d_i| + 1e-7, and no reputation falls below a floor, so that nobody is
shut out for good. As in the authors' code, there is nothing to remember before the first round: its reputations are
phi / sum(phi), whatever weighs the updates in u_N (there, the data shares).
"""

from __future__ import annotations

import torch
from torch import Tensor

EPSILON = 1e-7


def normalized(reputation: Tensor) -> Tensor:
    """float64 ``[k]``, reputations that sum to 1.

    Raises:
        ValueError: negative ones, or none above 0.
    """
    reputation = reputation.double()
    if not (reputation >= 0).all() or reputation.sum() == 0:
        raise ValueError(f"reputation={reputation.tolist()}: expected numbers that are not negative, not all 0.")
    return reputation / reputation.sum()


def cosines(products: Tensor, norms: Tensor, norm: Tensor) -> Tensor:
    """phi ``[k]`` in [-1, 1], from d_i . u_N, the |d_i| and |u_N|; 0 where a length is 0.

    Example:
        >>> cosines(torch.tensor([3.0, 0.0]), torch.tensor([2.0, 0.0]), torch.tensor(3.0))
        tensor([0.5000, 0.0000])
    """
    lengths = norms * norm
    return (products / lengths.where(lengths > 0, torch.ones_like(lengths))).clamp(-1, 1)


def updated_reputation(reputation: Tensor | None, phi: Tensor, *, alpha: float = 0.95, floor: float = 1e-3) -> Tensor:
    """The reputations ``[k]`` after a round, which sum to 1: max(alpha r + (1 - alpha) phi, floor), normalized.

    Before the first round, None, r is 0.

    Example:
        >>> updated_reputation(torch.tensor([1.0, 1.0]), torch.tensor([1.0, 0.0]), alpha=0.5)
        tensor([0.7500, 0.2500], dtype=torch.float64)
        >>> updated_reputation(None, torch.tensor([0.6, 0.2]), alpha=0.5)
        tensor([0.7500, 0.2500], dtype=torch.float64)
    """
    memory = 0 if reputation is None else alpha * normalized(reputation)
    after = (memory + (1 - alpha) * phi.double()).clamp_min(floor)
    return after / after.sum()


def cohort_reputation(reputation: Tensor | None, client_ids: Tensor, num_samples: Tensor) -> Tensor:
    """The weights ``[k]`` of a cohort's updates: their reputations before the round.

    Data shares in the first round, as in the authors' code. A participant that joins later starts from the mean of
    those that are known, which the paper, with full participation, has no need to say.

    Args:
        reputation: ``[n]`` of all participants, NaN where there is none yet; None: nobody has one.
        client_ids: ``[k]``, the cohort.
        num_samples: ``[k]`` training samples.

    Example:
        >>> cohort_reputation(None, torch.tensor([0, 2]), torch.tensor([30, 10]))
        tensor([0.7500, 0.2500], dtype=torch.float64)
        >>> held = torch.tensor([0.75, float("nan"), 0.25])
        >>> cohort_reputation(held, torch.tensor([0, 1]), torch.tensor([30, 10]))
        tensor([0.7500, 0.5000], dtype=torch.float64)
    """
    if reputation is None or reputation.isnan().all():
        return num_samples.double() / num_samples.sum()
    known = reputation.double()
    return known.where(~known.isnan(), known.nanmean())[client_ids.to(known.device)]
