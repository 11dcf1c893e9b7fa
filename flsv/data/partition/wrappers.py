"""Partitioners that change what another one deals: to a long tail of classes, and clients that cheat.

The long tail: Cao et al., "Learning Imbalanced Datasets with Label-Distribution-Aware Margin Loss", NeurIPS 2019,
section 4: class j of C keeps n_max * ratio^(-j / (C - 1)) samples. It is the first scenario of ShapleyFL (KDD 2023,
appendix B.3). Where the classes are not of equal size to begin with, n_max is the largest that all can bear, so that
the ratio is exact.

Cheating: one client that is several is the Sybil attack (Douceur, "The Sybil Attack", IPTPS 2002). Copies of data
inflate Shapley values of data as well: Han et al., "Replication-Robust Payoff-Allocation for Machine Learning Data
Markets", arXiv:2006.14583.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flsv.arguments import check_number
from flsv.data.partition.base import Partitioner, shuffled
from flsv.errors import ConfigurationError


class _Cheating(Partitioner):
    """What deals as another partitioner does, but for one client."""

    def __init__(self, partitioner: Partitioner, client: int, seed: int = 0) -> None:
        # No super().__init__: the number of clients is the other's, or not known yet.
        self.partitioner, self.client, self.seed = partitioner, client, seed
        self.needs_classes, self.keeps_groups = partitioner.needs_classes, partitioner.keeps_groups
        check_number(self, "client", client, least=0, whole=True)

    def _honest(self, labels: Tensor, num_classes: int, groups: Tensor | None) -> list[Tensor]:
        parts = self.partitioner(labels, num_classes, groups)
        if self.client >= len(parts):
            raise ConfigurationError(
                f"{type(self).__name__}(client={self.client}): there is no such client; they are 0 .. {len(parts) - 1}."
            )
        return parts


class Colluding(_Cheating):
    """Two clients pool their samples, and each sends the update of a client of twice the size.

    Args:
        partitioner: deals the samples.
        client: one of them.
        partner: the other one.
        seed: taken for uniformity; nothing here is random.

    Raises:
        ConfigurationError: one client twice, or a client that there is not.

    Example:
        >>> from flsv.data import IIDPartitioner
        >>> parts = Colluding(IIDPartitioner(3), client=0, partner=2)(torch.zeros(6, dtype=torch.long), num_classes=1)
        >>> [len(part) for part in parts], bool((parts[0] == parts[2]).all())
        ([4, 2, 4], True)
    """

    deals_copies = True

    def __init__(self, partitioner: Partitioner, client: int = 0, partner: int = 1, seed: int = 0) -> None:
        super().__init__(partitioner, client, seed)
        self.partner = partner
        check_number(self, "partner", partner, least=0, whole=True)
        if partner == client:
            raise ConfigurationError(f"{type(self).__name__}(client={client}, partner={partner}): one client twice.")
        self.num_clients = partitioner.num_clients

    def partition(
        self, labels: Tensor, num_classes: int, groups: Tensor | None, generator: torch.Generator
    ) -> Sequence[Tensor]:
        parts = self._of_two(labels, num_classes, groups)
        pool = torch.cat([parts[self.client], parts[self.partner]])
        parts[self.client], parts[self.partner] = pool, pool.clone()
        return parts

    def _of_two(self, labels: Tensor, num_classes: int, groups: Tensor | None) -> list[Tensor]:
        parts = self._honest(labels, num_classes, groups)
        if self.partner >= len(parts):
            raise ConfigurationError(
                f"{type(self).__name__}(partner={self.partner}): there is no such client; they are "
                f"0 .. {len(parts) - 1}."
            )
        return parts


class Duplicated(_Cheating):
    """One client repeats each of its samples ``times`` times, so that it counts more and makes more steps.

    Args:
        partitioner: deals the samples.
        client: who cheats.
        times: how often it has each sample, at least 2.
        seed: taken for uniformity; nothing here is random.

    Raises:
        ConfigurationError: a number out of range, a client that there is not.

    Example:
        >>> from flsv.data import IIDPartitioner
        >>> parts = Duplicated(IIDPartitioner(3), client=1, times=3)(torch.zeros(30, dtype=torch.long), num_classes=1)
        >>> [len(part) for part in parts], len(parts[1].unique())
        ([10, 30, 10], 10)
    """

    deals_copies = True

    def __init__(self, partitioner: Partitioner, client: int = 0, times: int = 3, seed: int = 0) -> None:
        super().__init__(partitioner, client, seed)
        self.times = times
        check_number(self, "times", times, least=2, whole=True)
        self.num_clients = partitioner.num_clients

    def partition(
        self, labels: Tensor, num_classes: int, groups: Tensor | None, generator: torch.Generator
    ) -> Sequence[Tensor]:
        parts = self._honest(labels, num_classes, groups)
        parts[self.client] = parts[self.client].repeat(self.times)
        return parts


class Framing(Colluding):
    """One client trains on another client's samples, so that the two look like one under two names.

    Args:
        partitioner: deals the samples.
        client: who cheats; its own samples are nobody's.
        partner: the other one, who knows nothing of it.
        seed: taken for uniformity; nothing here is random.

    Raises:
        ConfigurationError: one client twice, or a client that there is not.

    Example:
        >>> from flsv.data import IIDPartitioner
        >>> parts = Framing(IIDPartitioner(3), client=0, partner=2)(torch.zeros(6, dtype=torch.long), num_classes=1)
        >>> [len(part) for part in parts], bool((parts[0] == parts[2]).all())
        ([2, 2, 2], True)
    """

    deals_copies = True

    def partition(
        self, labels: Tensor, num_classes: int, groups: Tensor | None, generator: torch.Generator
    ) -> Sequence[Tensor]:
        parts = self._of_two(labels, num_classes, groups)
        parts[self.client] = parts[self.partner].clone()
        return parts


class Sybils(_Cheating):
    """One client appears as ``identities`` clients: itself and new ones with higher numbers.

    Everybody else keeps number and samples.

    Args:
        partitioner: deals the samples.
        client: who cheats.
        identities: as how many it comes, at least 2.
        split: whether they share its samples out; else each has them all.
        seed: of the split.

    Raises:
        ConfigurationError: a number out of range, a client that there is not, or fewer samples than identities.

    Example:
        >>> from flsv.data import IIDPartitioner
        >>> parts = Sybils(IIDPartitioner(2), client=0)(torch.zeros(6, dtype=torch.long), num_classes=1)
        >>> [len(part) for part in parts], bool((parts[0] == parts[2]).all())
        ([3, 3, 3], True)
    """

    def __init__(
        self, partitioner: Partitioner, client: int = 0, identities: int = 2, split: bool = False, seed: int = 0
    ) -> None:
        super().__init__(partitioner, client, seed)
        self.identities, self.split = identities, split
        check_number(self, "identities", identities, least=2, whole=True)
        self.deals_copies = partitioner.deals_copies or not split
        known: Any = partitioner.num_clients  # None where the data decide
        self.num_clients = known if known is None else known + identities - 1  # type: ignore[assignment]

    def partition(
        self, labels: Tensor, num_classes: int, groups: Tensor | None, generator: torch.Generator
    ) -> Sequence[Tensor]:
        parts = self._honest(labels, num_classes, groups)
        own = parts[self.client]
        shares = [own] * self.identities
        if self.split:
            shares = list(shuffled(own, generator).tensor_split(self.identities))
        parts[self.client] = shares[0]
        return [*parts, *shares[1:]]


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

    def __init__(self, partitioner: Partitioner, imbalance_ratio: float, seed: int = 0) -> None:
        # Not the base class's: a GroupPartitioner's number of clients is unknown until it sees the data.
        self.partitioner = partitioner
        self.num_clients = partitioner.num_clients
        self.imbalance_ratio = imbalance_ratio
        self.deals_copies = partitioner.deals_copies
        self.seed = seed
        check_number(self, "imbalance_ratio", imbalance_ratio, least=1)

    def partition(
        self, labels: Tensor, num_classes: int, groups: Tensor | None, generator: torch.Generator
    ) -> Sequence[Tensor]:
        kept = self._tail(labels, num_classes, generator)
        parts = self.partitioner(labels[kept], num_classes, None if groups is None else groups[kept])
        return [kept[part] for part in parts]

    def _tail(self, labels: Tensor, num_classes: int, generator: torch.Generator) -> Tensor:
        """Sorted indices of the samples that stay."""
        available = torch.bincount(labels, minlength=num_classes)
        present = available.nonzero().flatten().tolist()
        falls = torch.linspace(0, 1, len(present), dtype=torch.float64)
        shares = self.imbalance_ratio**-falls
        largest = float((available[present] / shares).min())
        sizes = (largest * shares).round().long().minimum(available[present])
        if sizes.min() == 0:
            raise ConfigurationError(
                f"{self!r}: the smallest class would keep {largest * float(shares[-1]):.2g} of its samples. The data "
                f"bear an imbalance_ratio of at most about {largest:.3g}."
            )
        kept = [
            shuffled((labels == label).nonzero().flatten(), generator)[:size]
            for label, size in zip(present, sizes.tolist(), strict=True)
        ]
        return torch.cat(kept).sort().values
