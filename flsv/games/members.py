"""Coalitions as tuples of their members."""

from __future__ import annotations

from torch import Tensor

Members = tuple[int, ...]


def members_of(masks: Tensor) -> list[Members]:
    """Return the members of each of K coalitions, ascending, from bool masks ``[K, n]``."""
    return [tuple(mask.nonzero().flatten().tolist()) for mask in masks]
