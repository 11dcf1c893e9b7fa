"""Consistency of the models that clients have trained alone at their sites, which the server cannot see trained."""

from __future__ import annotations

import torch
from torch import Tensor

#: A client's own model is suspicious if it is nearer to the federation's model than this fraction of its distance from
#: the initial model.
MIN_RELATIVE_DISTANCE = 0.1


def inconsistent_own_models(
    own_models: Tensor,
    initial_model: Tensor,
    federation_model: Tensor,
    update_sums: Tensor,
    has_others: Tensor | None = None,
) -> dict[int, str]:
    """Find clients whose own model was probably not trained by them alone.

    Two checks are made. The own model must not be the federation's model. And its difference from the initial model
    (its move) must point in the direction of the sum of this client's updates in the federation, more than most other
    clients' moves do, and more than in the direction of another client's updates. This agreement of directions is the
    cosine minus the median of the other clients' cosines with the same updates.

    Args:
        own_models: ``[n, P]``, the models that n clients have trained alone.
        initial_model: ``[P]``, the initial model.
        federation_model: ``[P]``, the federation's model that was last sent to the clients.
        update_sums: ``[n, P]``, the sums of the clients' updates in the federation so far.
        has_others: bool ``[n]``, whether another client's update is part of ``federation_model``. If not, the client's
            own model may be the federation's. None: True for all clients.

    Returns:
        ``{client: reason}``. A client whose own model has not moved, because its replies were lost, is not
        inconsistent. The second check is made for clients with a move and an update, if at least three clients have a
        move.

    Example:
        >>> own = torch.tensor([[1.0, 0, 0], [0, 1, 0], [0, 0, 1]])
        >>> model = torch.tensor([0.3, 0.3, 0.3])
        >>> inconsistent_own_models(torch.stack([own[0], own[0], model]), torch.zeros(3), model, own)
        {1: "its own model moves as client 0's updates do", 2: "its own model is the federation's"}
    """
    moves = own_models - initial_model  # [n, P]
    reasons = _reasons_by_directions(moves, update_sums)

    distances_to_federation = (own_models - federation_model).norm(dim=1)  # [n]
    is_near = distances_to_federation < MIN_RELATIVE_DISTANCE * moves.norm(dim=1)
    if has_others is not None:
        is_near &= has_others
    for client in is_near.nonzero().flatten().tolist():
        reasons[client] = "its own model is the federation's"
    return dict(sorted(reasons.items()))


def _reasons_by_directions(moves: Tensor, update_sums: Tensor) -> dict[int, str]:
    """Find clients whose moves ``[n, P]`` do not have the directions of their own updates ``[n, P]``, with reasons."""
    # A move or an update of length zero has no direction to compare.
    has_moved = moves.norm(dim=1) > 0
    has_update = update_sums.norm(dim=1) > 0
    if has_moved.sum() < 3:
        return {}

    reasons = {}
    cosines = _cosines(moves, update_sums)  # [n, n]
    for client in (has_moved & has_update).nonzero().flatten().tolist():
        is_other = has_moved.clone()
        is_other[client] = False
        reason = _wrong_direction(client, cosines[client], cosines[is_other.cpu()], has_update)
        if reason:
            reasons[client] = reason
    return reasons


def _wrong_direction(
    client: int, cosines_of_client: Tensor, cosines_of_others: Tensor, has_update: Tensor
) -> str:
    """Return why the client has probably not trained its own model alone. Empty if there is no reason to think so."""
    # The cosines of the client's move with each client's updates are [n], those of other clients' moves [others, n].
    typical_cosines = cosines_of_others.median(0).values
    agreement = cosines_of_client - typical_cosines  # [n]
    agreement[~has_update.cpu()] = -torch.inf

    closest = int(agreement.argmax())
    if cosines_of_client[closest] > cosines_of_client[client]:
        return f"its own model moves as client {closest}'s updates do"
    if agreement[client] <= 0:
        return "its own model does not move as its updates do"
    return ""


def _cosines(moves: Tensor, updates: Tensor) -> Tensor:
    unit_moves = torch.nn.functional.normalize(moves, dim=1)
    unit_updates = torch.nn.functional.normalize(updates, dim=1)
    products = unit_moves @ unit_updates.T
    return products.cpu().double()
