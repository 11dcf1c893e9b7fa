"""ShapFed: class-specific Shapley values (CSSV), and the weights made of them.

Tastan et al., "Redefining Contributions: Shapley-Driven Federated Learning", IJCAI 2024, equations 5 and 6. The cosine
between a participant's and the aggregate's row of the classifier head approximates the participant's contribution to
that class, without a validation set and without evaluating coalitions.

Departures from the authors' code, which follow the paper: the weights use (1 + cosine)/2 as in eq. 6 (without it they
can turn negative or blow up), and a zero row (a class without training samples) has cosine 0 instead of NaN.
"""

from __future__ import annotations

import torch
from torch import Tensor


def class_specific_shapley(client_heads: Tensor, server_head: Tensor) -> Tensor:
    """Compute the cosine of every participant's head rows with the aggregate's (eq. 5).

    Args:
        client_heads: ``[k, M, D]``, for each participant one row per class of its head: of its update or of its
            weights, with or without the bias.
        server_head: ``[M, D]``, the aggregate's head in the same form.

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
    """Compute each participant's contribution and its share of all contributions (eq. 6).

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
    """Divide each row by its largest absolute entry; rows of zeros stay as they are."""
    largest = rows.abs().amax(-1, keepdim=True)
    return rows / largest.where(largest > 0, torch.ones_like(largest))
