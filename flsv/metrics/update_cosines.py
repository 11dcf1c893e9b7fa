"""Cosines of clients' updates with their sum."""

from __future__ import annotations

import torch
from torch import Tensor

from flsv.core import ClientMatrix, Round
from flsv.functional.cgsv import EPSILON, cosines


def parameters_of(round: Round) -> ClientMatrix:
    """Return the matrix of the round's updates without the columns of buffers, which have no gradient."""
    return round.matrix.until(round.space.num_parameters)


def cosines_with_sum(matrix: ClientMatrix, norms: Tensor, weights: Tensor, epsilon: float = EPSILON) -> Tensor:
    """Compute the cosine ``[k]`` of each of k updates with the weighted sum of all updates, in which each update is
    scaled to length 1.

    Args:
        matrix: the updates ``[k, P]``.
        norms: ``[k]``, the updates' lengths.
        weights: ``[k]``, the updates' weights in the sum, on the device and in the dtype of ``norms``.
        epsilon: number that is added to each length before the update is divided by it; the cosines' denominators are
            without it.
    """
    total = matrix.combine(weights / (norms + epsilon))
    return cosines(matrix.dot(total), norms, torch.linalg.vector_norm(total, dtype=torch.float64))
