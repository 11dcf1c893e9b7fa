"""Clients that cheat when the data are dealt: one that is several, one that counts its samples several times, two that
pool theirs, and one that wants to look like another.

The first is the Sybil attack (Douceur, "The Sybil Attack", IPTPS 2002). Copies of data inflate Shapley values of data
as well: Han et al., "Replication-Robust Payoff-Allocation for Machine Learning Data Markets", arXiv:2006.14583.
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
        self.needs_classes = partitioner.needs_classes
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
        self.deals_copies = not split
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
