"""Collaborative fairness: whether clients that do well alone get the better models.

Lyu et al., "Collaborative Fairness in Federated Learning", 2020; used by CGSV (NeurIPS 2021) and by Tastan et al.,
"Redefining Contributions: Shapley-Driven Federated Learning", IJCAI 2024, section 4.3.
"""

from __future__ import annotations

import torch
from torch import Tensor


def collaborative_fairness(standalone: Tensor, final: Tensor) -> Tensor:
    """Compute Pearson's correlation, across clients, of standalone and final accuracy.

    Args:
        standalone: ``[n]``, the accuracy that each client reaches by training alone. Clients with a NaN in either
            vector are left out.
        final: ``[n]``, the accuracy of each client's model after the federation.

    Returns:
        A scalar in [-1, 1]; 1 is fair. NaN where the correlation is not defined: fewer than two clients, equal
        standalone accuracies, or equal final accuracies (FedAvg without local training gives all clients one model).

    Raises:
        ValueError: the shapes differ.

    Example:
        >>> alone = torch.tensor([0.8, 0.5, 0.3])
        >>> collaborative_fairness(alone, torch.tensor([0.9, 0.75, 0.65]))
        tensor(1.)
        >>> collaborative_fairness(alone, torch.tensor([0.7, 0.7, 0.7]))
        tensor(nan)
    """
    if standalone.ndim != 1 or standalone.shape != final.shape:
        raise ValueError(f"expected two vectors [n], got {list(standalone.shape)} and {list(final.shape)}.")
    dtype = torch.promote_types(standalone.dtype, torch.float32)
    pairs = torch.stack([standalone.double(), final.double()])
    pairs = pairs[:, ~pairs.isnan().any(0)]
    if pairs.shape[1] < 2 or (pairs == pairs[:, :1]).all(1).any():
        return torch.tensor(float("nan"), dtype=dtype, device=standalone.device)
    x, y = pairs - pairs.mean(1, keepdim=True)
    return ((x @ y) / (x.norm() * y.norm())).clamp(-1, 1).to(dtype)
