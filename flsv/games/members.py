"""Coalitions as tuples of their members."""

from __future__ import annotations

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
