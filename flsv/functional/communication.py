"""pFedSV's dynamic top-k: whose models a client downloads in this round.

Wu et al., "Rethinking Personalized Client Collaboration in Federated Learning", IEEE Transactions on Mobile Computing,
2024, section III-C ("Dynamic top-k download mechanism") and IV-B.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Generator, Tensor

from flsv.declared import Count, checked

Explore = Literal["score", "unvisited"]


@checked
def top_k_download(
    relevance: Tensor,
    available: Tensor,
    own: int,
    k: Count,
    explore: Explore = "score",
    generator: Generator | None = None,
) -> Tensor:
    """The clients to download, best first.

    A client with a negative score is never downloaded again. While there is one that was never looked at, k clients
    are downloaded, by score, those never looked at counting as 0 and ties falling at random; afterwards as many as have
    a positive score, at least 1 (if anybody is left who is not negative).

    Args:
        relevance: ``[n]`` scores of all clients, NaN: never looked at.
        available: bool ``[n]``, whose model the server has.
        own: who downloads; never itself.
        k: downloads a round to start with, at least 1.
        explore: ``"score"`` is the above. ``"unvisited"`` gives the k places to those never looked at first, which
            keeps the paper's bound (:func:`flsv.functional.discovery_bound`) for any number of relevant clients.
        generator: of the ties.

    Returns:
        int64 ``[k']`` on the CPU, k' from 0 to n - 1.

    Raises:
        ConfigurationError: k below 1, an unknown ``explore``.
        ValueError: shapes that do not fit.

    Example:
        >>> nan = float("nan")
        >>> relevance = torch.tensor([nan, 0.3, -0.2, 0.1, nan])
        >>> top_k_download(relevance, torch.ones(5, dtype=torch.bool), own=0, k=3)
        tensor([1, 3, 4])
        >>> top_k_download(relevance.nan_to_num(-0.1), torch.ones(5, dtype=torch.bool), own=0, k=3)
        tensor([1, 3])
    """
    if relevance.ndim != 1 or relevance.shape != available.shape or not 0 <= own < len(relevance):
        raise ValueError(
            f"expected relevance [n], available [n] and own in 0 .. n - 1, got {list(relevance.shape)}, "
            f"{list(available.shape)} and {own}."
        )
    unvisited = relevance.isnan().cpu()
    scores = relevance.detach().cpu().double().nan_to_num(0.0)
    candidates = available.cpu() & (scores >= 0)
    candidates[own] = False
    if not bool((candidates & unvisited).any()):
        k = max(int((candidates & (scores > 0)).sum()), 1)
    # A random order, then stable sorts by what matters less to what matters more.
    order = torch.randperm(len(scores), generator=generator)
    order = order[scores[order].argsort(descending=True, stable=True)]
    if explore == "unvisited":
        order = order[unvisited[order].int().argsort(descending=True, stable=True)]
    return order[candidates[order]][:k]
