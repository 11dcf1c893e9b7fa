"""Coalitions as tuples of their members."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

Members = tuple[int, ...]
EMPTY: Members = ()


def members_of(masks: Tensor) -> list[Members]:
    """Return the members of each of K coalitions, ascending, from bool masks ``[K, n]``."""
    coalitions = []
    for mask in masks:
        members = mask.nonzero().flatten()
        coalitions.append(tuple(members.tolist()))
    return coalitions


def masks_of(coalitions: Sequence[Members], num_clients: int) -> Tensor:
    """Return bool masks ``[K, n]`` of K coalitions of ``num_clients`` clients."""
    masks = torch.zeros(len(coalitions), num_clients, dtype=torch.bool)
    for mask, members in zip(masks, coalitions):
        mask[list(members)] = True
    return masks
