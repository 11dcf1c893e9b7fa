"""Cosines of clients' updates with their sum."""

from __future__ import annotations

import torch
from torch import Tensor

from flsv.core import ClientMatrix, Round
from flsv.functional.cgsv import EPSILON, cosines


def parameters_of(round: Round) -> ClientMatrix:
    """Return the cohort's matrix without buffers, which have no gradient."""
    return round.matrix.until(round.space.num_parameters)


def cosines_with_sum(matrix: ClientMatrix, norms: Tensor, weights: Tensor, epsilon: float = EPSILON) -> Tensor:
    """Compute the cosine of each update with the sum of all, ``[k]``; in the sum the updates are scaled to one length.

    Args:
        matrix: the updates ``[k, P]``.
        norms: ``[k]``, their lengths.
        weights: ``[k]``, the updates' weights in the sum, on the device and in the dtype of ``norms``.
        epsilon: added to the lengths in denominators.
    """
    total = matrix.combine(weights / (norms + epsilon))
    return cosines(matrix.dot(total), norms, torch.linalg.vector_norm(total, dtype=torch.float64))
