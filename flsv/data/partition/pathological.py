"""Clients that see only a few of the classes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flsv.data.partition.base import Partitioner, shuffled
from flsv.errors import ConfigurationError


class PathologicalPartitioner(Partitioner):
    """Every client holds exactly ``classes_per_client`` classes; a class is split evenly among its holders.

    Classes are dealt at random, the least held first: no class is held twice while another has no holder, so all are
    held when ``num_clients * classes_per_client >= num_classes``. Otherwise some classes' samples stay unused.

    Args:
        num_clients: number of clients, at least 2.
        classes_per_client: classes of each client, at least 1.
        seed: seed of the deal.

    Raises:
        ConfigurationError: more classes per client than the data have, or a class with fewer samples than holders.

    Example:
        >>> labels = torch.arange(10).repeat_interleave(100)
        >>> parts = PathologicalPartitioner(num_clients=5, classes_per_client=2)(labels, num_classes=10)
        >>> [len(labels[part].unique()) for part in parts]
        [2, 2, 2, 2, 2]
    """

    def __init__(self, num_clients: int, classes_per_client: int, seed: int = 0) -> None:
        super().__init__(num_clients, seed)
        self.classes_per_client = classes_per_client
        if classes_per_client < 1:
            raise ConfigurationError(f"{self!r}: classes_per_client must be at least 1.")

    def partition(
        self, labels: Tensor, num_classes: int, groups: Tensor | None, generator: torch.Generator
    ) -> Sequence[Tensor]:
        present = labels.unique()
        if self.classes_per_client > len(present):
            raise ConfigurationError(
                f"{self!r}: the data have samples of {len(present)} classes only. Lower classes_per_client to "
                f"{len(present)} or less."
            )
        holders: list[list[int]] = [[] for _ in present]
        for client in range(self.num_clients):
            # A stable sort of a random order by load: the least held classes first, ties at random.
            order = torch.randperm(len(present), generator=generator).tolist()
            for position in sorted(order, key=lambda position: len(holders[position]))[: self.classes_per_client]:
                holders[position].append(client)

        pieces: list[list[Tensor]] = [[] for _ in range(self.num_clients)]
        for label, clients in zip(present.tolist(), holders, strict=True):
            if not clients:
                continue
            members = shuffled(torch.nonzero(labels == label).flatten(), generator)
            if len(members) < len(clients):
                raise ConfigurationError(
                    f"{self!r}: class {label} has {len(members)} samples for its {len(clients)} holders, each of "
                    f"which needs one. Lower num_clients or classes_per_client, or use more data."
                )
            for client, piece in zip(clients, members.tensor_split(len(clients)), strict=True):
                pieces[client].append(piece)
        return [torch.cat(piece) for piece in pieces]
