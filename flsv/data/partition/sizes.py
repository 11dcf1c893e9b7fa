"""Clients that differ in how much they have, not in what: random samples in equal or given proportions."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from flsv.data.partition.base import Partitioner, cut, shuffled
from flsv.errors import ConfigurationError


class IIDPartitioner(Partitioner):
    """Random samples in equal numbers (they differ by at most one).

    Args:
        num_clients: number of clients, at least 2.
        seed: seed of the shuffle.

    Example:
        >>> [len(part) for part in IIDPartitioner(num_clients=3)(torch.zeros(10, dtype=torch.long), num_classes=1)]
        [4, 3, 3]
    """

    needs_classes = False

    def partition(
        self, labels: Tensor, num_classes: int, groups: Tensor | None, generator: torch.Generator
    ) -> Sequence[Tensor]:
        return shuffled(torch.arange(len(labels)), generator).tensor_split(self.num_clients)


class SizePartitioner(Partitioner):
    """Random samples in given proportions, all of them used.

    Args:
        proportions: one positive number per client, on any scale: ``[2, 3, 4, 5, 6]`` gives the clients 2/20 .. 6/20 of
            the samples (each off by less than one sample).
        seed: seed of the shuffle.

    Raises:
        ConfigurationError: fewer than 2 proportions, or one that is not a positive finite number.

    Example:
        >>> [len(part) for part in SizePartitioner([1, 2, 2])(torch.zeros(10, dtype=torch.long), num_classes=1)]
        [2, 4, 4]
    """

    needs_classes = False

    def __init__(self, proportions: list[float], seed: int = 0) -> None:
        super().__init__(len(proportions), seed)
        self.proportions = list(proportions)
        if not all(math.isfinite(share) and share > 0 for share in self.proportions):
            raise ConfigurationError(f"{self!r}: proportions must be positive numbers, one per client.")

    def partition(
        self, labels: Tensor, num_classes: int, groups: Tensor | None, generator: torch.Generator
    ) -> Sequence[Tensor]:
        shares = torch.tensor(self.proportions, dtype=torch.float64)
        return cut(shuffled(torch.arange(len(labels)), generator), shares / shares.sum())
