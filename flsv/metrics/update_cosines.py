"""Cosines of clients' updates with their sum."""

from __future__ import annotations

import torch
from torch import Tensor

from flsv.core import ClientMatrix, Round
from flsv.functional.cgsv import EPSILON, cosines


def parameters_of(round: Round) -> ClientMatrix:
    """Return the round's updates ``[k, P]`` of the P parameters, without the columns of buffers."""
    return round.matrix.until(round.space.num_parameters)


def cosines_with_sum(matrix: ClientMatrix, norms: Tensor, weights: Tensor, epsilon: float = EPSILON) -> Tensor:
    """Compute the cosines ``[k]`` of k updates with a weighted sum of these updates, each scaled to length 1.

    Args:
        matrix: the updates ``[k, P]``.
        norms: ``[k]``, the updates' lengths.
        weights: ``[k]``, the updates' weights in the sum, on the device and in the dtype of ``norms``.
        epsilon: number that is added to an update's length when the update is scaled for the sum, but not in the
            denominators of the cosines.
    """
    total = matrix.combine(weights / (norms + epsilon))
    return cosines(matrix.dot(total), norms, torch.linalg.vector_norm(total, dtype=torch.float64))
