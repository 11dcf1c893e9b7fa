"""Doubts about models that clients say they have trained alone.

A client at a site could send another model as its own, such as the federation's, and be paid for what others added. Its
own model must agree with what it sends to the federation. What passes these checks all the same is in
``docs/results/cheating.md``.
"""

from __future__ import annotations

import torch
from torch import Tensor

#: The least distance of a client's own model to the federation's, as a fraction of the way that training moved it.
NEAR = 0.05


def doubtful_own_models(own: Tensor, initial: Tensor, model: Tensor, updates: Tensor) -> dict[int, str]:
    """Find clients whose own model does not look as if they had trained it alone.

    Two checks are made. The own model must not be the federation's. And its move from the initial model must agree
    best, among all clients, with the sum of this client's own updates in the federation; all moves and sums are
    compared by the cosine, after the mean over the clients is subtracted.

    Args:
        own: ``[n, P]``, the models of n clients alone.
        initial: ``[P]``, the initial model.
        model: ``[P]``, the federation's model that clients were sent last.
        updates: ``[n, P]``, the sums of the clients' updates in the federation so far.

    Returns:
        ``{client: reason}``; with fewer than three clients only the first check is made.

    Example:
        >>> own = torch.tensor([[1.0, 0, 0], [0, 1, 0], [0, 0, 1]])
        >>> model = torch.tensor([0.3, 0.3, 0.3])
        >>> doubtful_own_models(torch.stack([own[0], own[0], model]), torch.zeros(3), model, own)
        {1: "its own model moves as client 0's updates do", 2: "its own model is the federation's"}
    """
    moves = own - initial
    near = (own - model).norm(dim=1) < NEAR * moves.norm(dim=1)
    found = dict.fromkeys(near.nonzero().flatten().tolist(), "its own model is the federation's")
    if len(own) < 3:
        return found
    centered = [torch.nn.functional.normalize(each - each.mean(0), dim=1) for each in (moves, updates)]
    best = (centered[0] @ centered[1].T).argmax(1).tolist()
    for client, other in enumerate(best):
        if other != client and client not in found:
            found[client] = f"its own model moves as client {other}'s updates do"
    return dict(sorted(found.items()))
