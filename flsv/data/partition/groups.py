"""Natural clients: a hospital, a writer, a device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flsv.data.partition.base import Partitioner
from flsv.errors import ConfigurationError


class GroupPartitioner(Partitioner):
    """One client per natural group, or whole groups dealt to a given number of clients.

    A group is never split. With fewer clients than groups, groups are dealt in turn from the largest to the smallest,
    which keeps the clients' sizes close where the groups are many.

    Args:
        num_clients: number of clients, at least 2; None makes one client of each group, in the groups' order, and is
            known to the caller only after the data have been seen. Clients are called after their groups.
        seed: taken for uniformity; nothing here is random.

    Raises:
        ConfigurationError: data without groups, fewer than 2 groups, or fewer groups than clients.

    Example:
        >>> hospital = torch.tensor([7, 7, 7, 3, 3, 9])
        >>> GroupPartitioner()(torch.zeros(6, dtype=torch.long), num_classes=1, groups=hospital)
        [tensor([3, 4]), tensor([0, 1, 2]), tensor([5])]
    """

    needs_classes = False
    keeps_groups = True

    def __init__(self, num_clients: int | None = None, seed: int = 0) -> None:
        super().__init__(2 if num_clients is None else num_clients, seed)
        self.num_clients = num_clients  # type: ignore[assignment] # unknown until the groups are seen

    def partition(
        self, labels: Tensor, num_classes: int, groups: Tensor | None, generator: torch.Generator
    ) -> Sequence[Tensor]:
        if groups is None:
            raise ConfigurationError(
                f"{self!r} needs to know each sample's group. Give the data module groups=[...], one entry per "
                f"training sample, the name of an attribute or a field that has them, or a data set with an attribute "
                f"`groups`."
            )
        _, member_of, sizes = groups.cpu().unique(return_inverse=True, return_counts=True)
        clients = len(sizes) if self.num_clients is None else self.num_clients
        if len(sizes) < max(clients, 2):
            raise ConfigurationError(
                f"{self!r}: the samples fall into {len(sizes)} groups, and a group is not split. At least "
                f"{max(clients, 2)} groups are needed; lower num_clients, or choose a partitioner that splits samples."
            )
        if self.num_clients is None:
            client_of = torch.arange(len(sizes))
        else:
            client_of = torch.empty(len(sizes), dtype=torch.long)
            client_of[sizes.argsort(descending=True, stable=True)] = torch.arange(len(sizes)) % clients
        return [torch.nonzero(client_of[member_of] == client).flatten() for client in range(clients)]
