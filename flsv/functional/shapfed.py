"""ShapFed: class-specific Shapley values (CSSV), participants' weights computed from them, and collaborative fairness.

Tastan et al., "Redefining Contributions: Shapley-Driven Federated Learning", IJCAI 2024, eqs. 5 and 6, section 4.3.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import normalize


def class_specific_shapley(client_heads: Tensor, server_head: Tensor) -> Tensor:
    """Compute cosines between participants' and the aggregate's head rows (eq. 5).

    Args:
        client_heads: the classifier heads of k participants, ``[k, M, D]``, one row for each of M classes. Either the
            heads' updates or their weights, with or without the bias.
        server_head: the aggregate's head in the same form, ``[M, D]``.

    Returns:
        The cosines, ``[k, M]``, in [-1, 1]. 0 if either row is zero.

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
    client_directions = _unit_rows(client_heads.double())
    server_directions = _unit_rows(server_head.double())
    products = client_directions * server_directions
    cosines = products.sum(-1).clamp(-1, 1)
    return cosines.to(client_heads.dtype)


def participant_weights(cssv: Tensor) -> tuple[Tensor, Tensor]:
    """Compute each participant's contribution and its share of all contributions (eq. 6).

    Args:
        cssv: the cosines of k participants for M classes, ``[k, M]``, in [-1, 1].

    Returns:
        The contributions ``[k]`` in [0, 1], means over the classes of (1 + cosine)/2, and the shares ``[k]``, which sum
        to 1 and are equal if every contribution is 0.

    Example:
        >>> gamma, share = participant_weights(torch.tensor([[1.0, 1.0], [0.0, -1.0]]))
        >>> gamma, share
        (tensor([1.0000, 0.2500]), tensor([0.8000, 0.2000]))
    """
    in_unit_interval = (1 + cssv) / 2
    contributions = in_unit_interval.mean(-1)  # gamma
    total = contributions.sum()
    equal_share = 1 / max(len(contributions), 1)
    shares = torch.where(total > 0, contributions / total, equal_share)
    return contributions, shares


def _unit_rows(rows: Tensor) -> Tensor:
    """Scale each row to length 1. A zero row does not change."""
    # Dividing by the row's largest element first prevents squares of tiny updates (1e-30) from underflowing.
    largest = rows.abs().amax(-1, keepdim=True)
    divisors = largest.where(largest > 0, 1.0)
    scaled = rows / divisors
    return normalize(scaled, dim=-1)


def collaborative_fairness(standalone: Tensor, final: Tensor) -> Tensor:
    """Compute Pearson's correlation, across clients, of standalone and final accuracy.

    Args:
        standalone: ``[n]``, the accuracy that each client reaches by training alone. Clients with a NaN in either
            vector are excluded.
        final: ``[n]``, the accuracy of each client's model after the federation.

    Returns:
        A scalar in [-1, 1]. 1 is fair. NaN if the correlation is not defined: fewer than two clients, equal
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
        raise ValueError(
            f"expected two vectors [n], got {list(standalone.shape)} and {list(final.shape)}."
        )
    dtype = torch.promote_types(standalone.dtype, torch.float32)
    standalone = standalone.double()
    final = final.double()
    accuracies = torch.stack([standalone, final])  # [2, n]
    has_nan = accuracies.isnan().any(0)
    accuracies = accuracies[:, ~has_nan]

    first_client = accuracies[:, :1]
    is_constant = (accuracies == first_client).all(1)  # also with fewer than two clients
    if is_constant.any():
        undefined = standalone.new_tensor(torch.nan)
        return undefined.to(dtype)

    means = accuracies.mean(1, keepdim=True)
    standalone_deviations, final_deviations = accuracies - means
    product_of_norms = standalone_deviations.norm() * final_deviations.norm()
    product = standalone_deviations @ final_deviations
    correlation = product / product_of_norms
    return correlation.clamp(-1, 1).to(dtype)
