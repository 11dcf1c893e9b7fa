"""Inclusion probabilities for importance sampling of clients (ShapleyFL theorem 5.1, AFedSV+)."""

from __future__ import annotations

import torch
from torch import Tensor

from flsv.utilities.declared import Positive, checked
from flsv.utilities.errors import ConfigurationError


@checked
def importance_probabilities(weights: Tensor, expected_cohort: Positive) -> Tensor:
    """Compute the inclusion probabilities that minimize the variance of the Horvitz-Thompson aggregate.

        min_p sum_i w_i^2 / p_i    subject to  sum_i p_i = m,  0 <= p_i <= 1           (eq. 8)

    with w_i the weight and p_i the probability of client i, and m the expected number of clients. The l clients with
    the largest weights get probability 1, each other client i gets (m - l) w_i / (the sum of the other clients'
    weights) (eq. 9).

    The paper compares the objectives of all l in 0..m-1 whose probabilities are in [0, 1] (the theorem's text omits
    this condition, its proof in appendix C.1 has it), and takes the l with the smallest objective. This is always the
    smallest such l (the Karush-Kuhn-Tucker point), which is taken here, for any real m. Clients of equal weight get
    equal probabilities. Clients of weight 0 get probability 0, unless fewer than m clients have a positive weight. Then
    they share the rest of m equally.

    Args:
        weights: the clients' aggregation weights, ``[n]``, not negative and finite. Their scale does not matter.
        expected_cohort: m, the expected number of clients per round, in (0, n].

    Returns:
        Inclusion probabilities ``[n]`` in [0, 1], summing to m, in the dtype of ``weights`` (float32 for integers).

    Raises:
        ConfigurationError: ``expected_cohort`` is outside (0, n].
        ValueError: a weight is negative, NaN or infinite, or the weights are not a vector.

    Example:
        >>> importance_probabilities(torch.tensor([6.0, 1.0, 1.0, 2.0]), 2)
        tensor([1.0000, 0.2500, 0.2500, 0.5000])
    """
    if weights.ndim != 1:
        raise ValueError(f"importance_probabilities: weights of shape {tuple(weights.shape)}; expected [n].")
    if expected_cohort > len(weights):
        given = f"importance_probabilities(expected_cohort={expected_cohort})"
        raise ConfigurationError(f"{given}: of {len(weights)} clients so many cannot be drawn.")
    bad = (~torch.isfinite(weights) | (weights < 0)).nonzero().flatten().tolist()
    if bad:
        raise ValueError(f"importance_probabilities: the weights of clients {bad} are negative, NaN or infinite.")
    dtype = weights.dtype if weights.dtype.is_floating_point else torch.float32
    w = weights.to(torch.float64)
    w = w / w.max().clamp_min(torch.finfo(torch.float64).tiny)
    descending, order = w.sort(descending=True, stable=True)
    # Entry l of each: the sum of the weights from the l-th largest on, and the share of the l-th largest in it.
    rest = descending.flip(0).cumsum(0).flip(0)
    room = expected_cohort - torch.arange(len(w), dtype=torch.float64, device=w.device)
    even = 1 / torch.arange(len(w), 0, -1, dtype=torch.float64, device=w.device)
    share = torch.where(rest > 0, descending / rest, even)
    feasible = room * share <= 1 + 1e-12
    certain = int(feasible.int().argmax()) if bool(feasible.any()) else len(w)
    sorted_p = torch.ones_like(w)
    if certain < len(w):
        tail = descending[certain:]
        shares = tail / rest[certain] if rest[certain] > 0 else torch.full_like(tail, 1 / len(tail))
        sorted_p[certain:] = room[certain].clamp_min(0) * shares
    probabilities = torch.empty_like(w)
    probabilities[order] = sorted_p.clamp_max(1)
    return probabilities.to(weights.device, dtype)
