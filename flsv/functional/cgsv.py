"""Cosine gradient Shapley values (CGSV): reputations from the cosines of participants' updates with the aggregate.

Xu et al., "Gradient Driven Rewards to Guarantee Fairness in Collaborative Machine Learning", NeurIPS 2021, Algorithm 1:

    u_i = scale d_i / |d_i|,   u_N = sum_i r_i u_i,   phi_i = cos(u_i, u_N)

with d_i the participants' updates, r_i their reputations (:func:`updated_reputation`), and ``scale`` a constant that
does not change phi. The division by |d_i| is a division by |d_i| + 1e-7, so that an update may be zero.
"""

from __future__ import annotations

import torch
from torch import Tensor

EPSILON = 1e-7


def normalized(reputation: Tensor) -> Tensor:
    """Normalize reputations to sum to 1.

    Args:
        reputation: the participants' reputations, ``[k]``.

    Returns:
        float64 ``[k]``.

    Raises:
        ValueError: a reputation is negative, or all are 0.
    """
    reputation = reputation.double()
    if not (reputation >= 0).all() or reputation.sum() == 0:
        raise ValueError(f"reputation={reputation.tolist()}: expected numbers that are not negative, not all 0.")
    return reputation / reputation.sum()


def cosines(products: Tensor, norms: Tensor, norm: Tensor) -> Tensor:
    """Compute the cosines phi of the updates with the aggregate.

    Args:
        products: the updates' scalar products with the aggregate, ``[k]``.
        norms: the updates' lengths, ``[k]``.
        norm: the aggregate's length, a scalar.

    Returns:
        ``[k]`` in [-1, 1]; 0 where a length is 0.

    Example:
        >>> cosines(torch.tensor([3.0, 0.0]), torch.tensor([2.0, 0.0]), torch.tensor(3.0))
        tensor([0.5000, 0.0000])
    """
    lengths = norms * norm
    return (products / lengths.where(lengths > 0, torch.ones_like(lengths))).clamp(-1, 1)


def updated_reputation(reputation: Tensor | None, phi: Tensor, *, alpha: float = 0.95, floor: float = 1e-3) -> Tensor:
    r"""Update reputations by the cosines of a round.

    .. math:: r_i \leftarrow \max(\alpha r_i + (1 - \alpha) \phi_i, \text{floor})

    with r_i the reputations, which are divided by their sum afterwards, and phi_i the cosines. The floor keeps
    participants from being excluded for good. As in the authors' code, all r_i are 0 before the first round. After the
    first round they are therefore phi / sum(phi) (up to the floor), whatever weights the updates have in the aggregate.

    Args:
        reputation: the reputations before the round, ``[k]``; None before the first round.
        phi: the cosines of the round, ``[k]``, see :func:`cosines`.
        alpha: the factor of the former reputation.
        floor: the least reputation before the normalization.

    Returns:
        float64 ``[k]``, sums to 1.

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
    """Return the reputations with which the updates of a round's k participants are weighted.

    In the first round, as in the authors' code, a participant has its share of the cohort's samples as reputation. A
    participant that joins later starts from the mean of the known reputations; the paper assumes full participation
    and does not cover this case.

    Args:
        reputation: the reputations of all n participants, ``[n]``, NaN for participants without one; None before the
            first round.
        client_ids: the indices of the cohort's participants, ``[k]``.
        num_samples: the cohort's numbers of training samples, ``[k]``.

    Returns:
        float64 ``[k]``; the sum is 1 in the first round and arbitrary later.

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
