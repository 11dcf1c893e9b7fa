"""Class-specific Shapley values (CSSV) of ShapFed.

Tastan et al., "Redefining Contributions: Shapley-Driven Federated Learning", IJCAI 2024, equations 5 and 6. The cosine
between a participant's and the aggregate's row of the classifier head stands for the participant's contribution to that
class: no validation set and no coalition is evaluated.

Departures from the authors' code, which follow the paper: the weights use (1 + cosine)/2 as eq. 6 says (without it they
can turn negative or blow up), and a zero row (a class nobody trained) has cosine 0 instead of NaN.
"""

from __future__ import annotations

import torch
from torch import Tensor


def class_specific_shapley(client_heads: Tensor, server_head: Tensor) -> Tensor:
    """Cosine of every participant's head rows with the aggregate's (eq. 5).

    Args:
        client_heads: ``[k, M, D]``, row j of participant i's head (of its update, or of its weights), bias included or
            not.
        server_head: ``[M, D]``, the same of the aggregate.

    Returns:
        ``[k, M]`` cosines in [-1, 1]; 0 where either row is zero.

    Raises:
        ValueError: the shapes do not fit.

    Example:
        >>> heads = torch.tensor([[[1.0, 0.0], [0.0, 2.0]], [[0.0, 1.0], [0.0, 0.0]]])
        >>> class_specific_shapley(heads, torch.tensor([[3.0, 0.0], [0.0, 1.0]]))
        tensor([[1., 1.],
                [0., 0.]])
    """
    if client_heads.ndim != 3 or server_head.shape != client_heads.shape[1:]:
        raise ValueError(
            f"expected client_heads [k, M, D] and server_head [M, D], got {list(client_heads.shape)} and "
            f"{list(server_head.shape)}."
        )
    # Normalizing each side by its own largest entry first keeps tiny updates (1e-30) from underflowing when squared.
    clients = torch.nn.functional.normalize(_scaled(client_heads.double()), dim=-1)
    server = torch.nn.functional.normalize(_scaled(server_head.double()), dim=-1)
    return (clients * server).sum(-1).clamp(-1, 1).to(client_heads.dtype)


def participant_weights(cssv: Tensor) -> tuple[Tensor, Tensor]:
    """A participant's contribution, and its share (eq. 6).

    Args:
        cssv: ``[k, M]`` cosines in [-1, 1].

    Returns:
        ``gamma [k]`` in [0, 1], the mean over classes of (1 + cosine)/2, and ``normalized [k]``, which sums to 1. If
        every gamma is 0 the shares are equal.

    Example:
        >>> gamma, share = participant_weights(torch.tensor([[1.0, 1.0], [0.0, -1.0]]))
        >>> gamma, share
        (tensor([1.0000, 0.2500]), tensor([0.8000, 0.2000]))
    """
    gamma = ((1 + cssv) / 2).mean(-1)
    total = gamma.sum()
    share = torch.where(total > 0, gamma / total, 1 / max(len(gamma), 1))
    return gamma, share


def _scaled(rows: Tensor) -> Tensor:
    largest = rows.abs().amax(-1, keepdim=True)
    return rows / largest.where(largest > 0, torch.ones_like(largest))
