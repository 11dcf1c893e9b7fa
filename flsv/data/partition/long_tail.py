"""A partitioner that changes what another one deals, to a long tail of classes.

Cao et al., "Learning Imbalanced Datasets with Label-Distribution-Aware Margin Loss", NeurIPS 2019,
section 4: class j of C keeps n_max * ratio^(-j / (C - 1)) samples. It is the first scenario of ShapleyFL (KDD 2023,
appendix B.3). Where the classes are not of equal size to begin with, n_max is the largest that all can bear, so that
the ratio is exact.
"""

from __future__ import annotations

from typing import Annotated

import torch
from annotated_types import Ge
from torch import Generator, Tensor

from flsv.data.partition.base import Partitioner, shuffled
from flsv.errors import ConfigurationError


class LongTail(Partitioner):
    """Applies another partitioner to a long-tailed subset of the samples.

    Sizes fall off in the order of the classes, from class 0 on. The server's validation set is taken out before, so it
    keeps the classes as they are.

    Args:
        partitioner: deals what is left.
        imbalance_ratio: samples of the largest class by those of the smallest, at least 1.
        seed: seed of which samples of a class are kept.

    Raises:
        ConfigurationError: a ratio below 1; at the call, one that leaves a class without samples.

    Example:
        >>> from flsv.data import IIDPartitioner, partition_counts
        >>> labels = torch.arange(3).repeat_interleave(100)
        >>> parts = LongTail(IIDPartitioner(2), imbalance_ratio=25)(labels, num_classes=3)
        >>> partition_counts(parts, labels, num_classes=3).sum(0)
        tensor([100,  20,   4])
    """

    def __init__(
        self, partitioner: Partitioner, imbalance_ratio: Annotated[float, Ge(1)], seed: int | None = None
    ) -> None:
        # Not the base class's: a GroupPartitioner's number of clients is unknown until it sees the data.
        self.partitioner = partitioner
        self.num_clients = partitioner.num_clients
        self.imbalance_ratio = imbalance_ratio
        self.seed = seed

    def partition(self, labels: Tensor, num_classes: int, groups: Tensor | None, generator: Generator) -> list[Tensor]:
        kept = self._tail(labels, num_classes, generator)
        parts = self.partitioner(labels[kept], num_classes, None if groups is None else groups[kept])
        return [kept[part] for part in parts]

    def _tail(self, labels: Tensor, num_classes: int, generator: Generator) -> Tensor:
        """Sorted indices of the samples that stay."""
        available = torch.bincount(labels, minlength=num_classes)
        present = available.nonzero().flatten().tolist()
        falls = torch.linspace(0, 1, len(present), dtype=torch.float64)
        shares = self.imbalance_ratio**-falls
        largest = float((available[present] / shares).min())
        sizes = (largest * shares).round().long().minimum(available[present])
        if sizes.min() == 0:
            raise ConfigurationError(
                f"{self!r}: the smallest class would keep {largest * float(shares[-1]):.2g} of its samples. Lower "
                "imbalance_ratio, or use more data."
            )
        kept = [
            shuffled((labels == label).nonzero().flatten(), generator)[:size]
            for label, size in zip(present, sizes.tolist(), strict=True)
        ]
        return torch.cat(kept).sort().values
