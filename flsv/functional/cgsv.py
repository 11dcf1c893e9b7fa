"""Cosine gradient Shapley values (CGSV): reputations from the cosines of participants' updates with the aggregate.

Xu et al., "Gradient Driven Rewards to Guarantee Fairness in Collaborative Machine Learning", NeurIPS 2021, Algorithm 1:

    u_i = scale d_i / |d_i|,   u_N = sum_i r_i u_i,   phi_i = cos(u_i, u_N)

with d_i the participants' updates, r_i their reputations (:func:`updated_reputation`), and ``scale`` a constant that
does not change phi. The division by |d_i| is a division by |d_i| + 1e-7, so that an update may be zero.
"""

from __future__ import annotations

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
    total = reputation.sum()
    is_valid = (reputation >= 0).all()
    if not is_valid or total == 0:
        raise ValueError(
            f"expected reputations of at least 0 that are not all 0, but got {reputation.tolist()}."
        )
    return reputation / total


def cosines(products: Tensor, norms: Tensor, norm: Tensor) -> Tensor:
    """Compute the cosines ``[k]`` of k updates with the aggregate. ``products`` are their inner products with it,
    ``norms`` their norms, ``norm`` is its norm. 0 where a norm is 0.
    """
    lengths = norms * norm
    divisors = lengths.where(lengths > 0, 1.0)
    return (products / divisors).clamp(-1, 1)


def updated_reputation(
    reputation: Tensor | None,
    contributions: Tensor,
    *,
    alpha: float = 0.95,
    floor: float = 1e-3,
) -> Tensor:
    """Update the reputations r ``[k]`` by the contributions, the cosines phi. The result is max(alpha r + (1 - alpha)
    phi, floor), normalized to sum to 1.
    """
    # Because of the floor no participant is excluded permanently. As in the authors' code all reputations are 0 before
    # the first round, so that only the contributions count then, not the updates' weights in the aggregate.
    updated = (1 - alpha) * contributions.double()
    if reputation is not None:
        updated = alpha * normalized(reputation) + updated
    updated = updated.clamp_min(floor)
    return updated / updated.sum()


def cohort_reputation(
    reputation: Tensor | None,
    client_ids: Tensor,
    num_samples: Tensor,
) -> Tensor:
    """Return the reputations ``[k]`` of a round's clients as weights. Before the first round these are shares of
    samples.
    """
    # As in the authors' code, these are shares of samples in the first round. A participant that joins later starts
    # from the mean of the existing reputations. The paper assumes full participation.
    if reputation is None or reputation.isnan().all():
        return num_samples.double() / num_samples.sum()
    reputation = reputation.double()
    completed = reputation.where(~reputation.isnan(), reputation.nanmean())
    return completed[client_ids.to(completed.device)]
