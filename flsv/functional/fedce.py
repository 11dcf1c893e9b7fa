"""FedCE: contribution estimates from the direction of each client's update and the error of the model without it.

A client's estimate is larger if its update points away from the others' updates, and if the aggregate of the others'
models has a large error on the client's data. Jiang et al., "Fair Federated Medical Image Segmentation via Client
Contribution Estimation", CVPR 2023. Formulas as in the authors' code (NVIDIA FLARE, ``research/fed-ce``).
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from flsv.utilities.declared import checked

Combine = Literal["times", "plus"]
#: Norms below this number count as this number, as in ``torch.nn.functional.cosine_similarity``.
EPSILON = 1e-8
#: A sum's squared norm, relative to that of parallel terms, up to which it is a rounding error.
ROUNDING = 1e-13
#: The number to which smaller shares are raised, as in the authors' code.
FLOOR = 1e-3
#: Deviation of a weight from [0, 1] that rounding can explain.
WEIGHT_TOLERANCE = 1e-6


def leave_one_out_cosines(gram: Tensor, weights: Tensor) -> Tensor:
    r"""Compute each update's cosine with the weighted sum of the others'.

    .. math:: \cos_i = \cos\Big(d_i, \sum_j c_j d_j - c_i d_i\Big)

    Args:
        gram: the scalar products of the k updates d with each other, ``[k, k]``.
        weights: the updates' weights c in the sum, ``[k]``.

    Returns:
        float64 ``[k]`` in [-1, 1]. 0 for a client whose update, or whose sum of the others' updates, is zero.

    Raises:
        ValueError: the shapes do not fit.

    Example:
        >>> updates = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 2.0]])
        >>> leave_one_out_cosines(updates @ updates.T, torch.tensor([0.25, 0.25, 0.5]))
        tensor([0.2425, 0.2425, 0.0000], dtype=torch.float64)
    """
    k = len(weights)
    if weights.ndim != 1 or gram.shape != (k, k):
        raise ValueError(
            f"expected gram [k, k] and weights [k]; got {list(gram.shape)} and {list(weights.shape)}."
        )
    gram = gram.double()
    weights = weights.to(gram.device).double()
    update_norms = gram.diagonal().clamp_min(0).sqrt()

    # other_weights [k, k]: row i has the weights of all updates except the i-th.
    identity = torch.eye(k, dtype=torch.float64, device=gram.device)
    other_weights = weights.expand(k, k) * (1 - identity)
    sum_norms = _norms_of_sums(gram, update_norms, other_weights)
    products = (gram * other_weights).sum(dim=1)
    products = products.where(sum_norms > 0, 0.0)
    norm_products = update_norms.clamp_min(EPSILON) * sum_norms.clamp_min(EPSILON)
    return (products / norm_products).clamp(-1, 1)


def _norms_of_sums(gram: Tensor, update_norms: Tensor, weights: Tensor) -> Tensor:
    # [k], a norm for each row of the weights [k, k]
    # The squared norm of each sum: c^T G c, with the row c of the weights.
    squared_norms = torch.einsum("ia,ab,ib->i", weights, gram, weights)
    # A sum that is far shorter than if all updates pointed one way is a rounding error, and so are its products.
    max_norms = (weights.abs() * update_norms).sum(dim=1)
    is_sum = squared_norms > ROUNDING * max_norms.square()
    return torch.where(is_sum, squared_norms, 0).sqrt()


@checked
def contribution_estimates(
    cosines: Tensor,
    scores: Tensor,
    combine: Combine = "times",
    cap: float | None = None,
) -> Tensor:
    """Compute FedCE's weights from mean cosines and mean scores.

    Let cos_i be the cosine of client i's update with the others' (see :func:`leave_one_out_cosines`), and m_i the score
    of the aggregate without client i on the client's own validation samples. With means over the rounds,

        a_i = 1 - mean cos_i,    e_i = 1 - mean m_i,    weight c_i = a_i e_i ("times") or a_i + e_i ("plus").

    a and e are divided by their sums before they are combined, and c is divided by its sum at the end. After each of
    the three divisions, numbers below 0.001 are raised to 0.001.

    Clients report their scores themselves, and the lower the reported score, the larger the weight. ``cap`` bounds the
    errors e, so that a client cannot raise its weight at will.

    Args:
        cosines: the clients' means of cos_i over the rounds so far, ``[n]``, in [-1, 1].
        scores: the clients' means of m_i over the rounds so far, ``[n]``, in [0, 1].
        combine: ``"times"``: multiply a and e. ``"plus"``: add them.
        cap: the bound on the errors e, as a multiple of their median over the clients. None: no bound.

    Returns:
        The weights, float64 ``[n]``. As in the authors' code, their sum is above 1 if a weight is raised.

    Raises:
        ConfigurationError: ``combine`` is unknown.
        ValueError: a score is outside [0, 1].

    Example:
        >>> contribution_estimates(torch.tensor([0.5, 0.5, -0.5]), torch.tensor([0.9, 0.8, 0.8]))
        tensor([0.1111, 0.2222, 0.6667], dtype=torch.float64)
        >>> contribution_estimates(torch.zeros(3), torch.tensor([0.8, 0.8, 0.0]), cap=1.25)
        tensor([0.3077, 0.3077, 0.3846], dtype=torch.float64)
    """
    is_outside = (scores < 0) | (scores > 1)
    if is_outside.any():
        raise ValueError(
            f"FedCE's error is 1 - score, so scores must be in [0, 1], but got {scores.tolist()}."
        )
    directions = _shares(1 - cosines.double())
    errors = 1 - scores.double()
    if cap is not None and len(errors):
        median = errors.quantile(0.5)
        errors = errors.clamp_max(cap * median)
    error_shares = _shares(errors)

    if combine == "times":
        return _shares(directions * error_shares)
    return _shares(directions + error_shares)


def _shares(values: Tensor) -> Tensor:
    """Divide values by their sum, and raise shares below the floor to it."""
    total = values.sum()
    if total > 0:
        return (values / total).clamp_min(FLOOR)
    equal_share = 1 / max(len(values), 1)
    return torch.full_like(values, equal_share).clamp_min(FLOOR)


def without_own(
    aggregate: Tensor,
    own: Tensor,
    weight: float,
) -> Tensor | None:
    """Compute the average of the other clients' models, (A - w x) / (1 - w).

    Args:
        aggregate: the weighted average A of all models, ``[P]``.
        own: the model x of the excluded client, ``[P]``.
        weight: the weight w of this model in the average, in [0, 1].

    Returns:
        ``[P]``. None if ``weight`` is 1, so that the other clients have no weight.

    Raises:
        ValueError: ``weight`` is outside [0, 1].

    Example:
        >>> without_own(torch.tensor([3.0, 5.0]), torch.tensor([1.0, 1.0]), 0.5)
        tensor([5., 9.])
    """
    if not -WEIGHT_TOLERANCE <= weight <= 1 + WEIGHT_TOLERANCE:
        raise ValueError(f"expected a weight in the aggregate in [0, 1], but got {weight}.")
    weight_of_others = 1 - weight
    if weight_of_others < WEIGHT_TOLERANCE:
        return None
    return (aggregate - weight * own) / weight_of_others
