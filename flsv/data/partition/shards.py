"""The label-sorted shards of McMahan et al. 2017 (Communication-Efficient Learning of Deep Networks, section 3)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flsv.data.partition.base import Partitioner, shuffled
from flsv.errors import ConfigurationError


class ShardPartitioner(Partitioner):
    """Sort by label, cut into equal shards, deal ``shards_per_client`` random shards to each client.

    A client sees at most about ``shards_per_client`` classes (one more for each class border inside a shard), and all
    clients have the same number of samples up to one per shard. All samples are used.

    Args:
        num_clients: number of clients, at least 2.
        shards_per_client: shards of each client, at least 1; the paper's value is 2.
        seed: seed of the deal.

    Raises:
        ConfigurationError: more shards than samples.

    Example:
        >>> labels = torch.arange(10).repeat_interleave(60)
        >>> parts = ShardPartitioner(num_clients=10, shards_per_client=2)(labels, num_classes=10)
        >>> max(len(labels[part].unique()) for part in parts)
        2
    """

    def __init__(self, num_clients: int, shards_per_client: int = 2, seed: int = 0) -> None:
        super().__init__(num_clients, seed)
        self.shards_per_client = shards_per_client
        if shards_per_client < 1:
            raise ConfigurationError(f"{self!r}: shards_per_client must be at least 1.")

    def partition(
        self, labels: Tensor, num_classes: int, groups: Tensor | None, generator: torch.Generator
    ) -> Sequence[Tensor]:
        num_shards = self.num_clients * self.shards_per_client
        if num_shards > len(labels):
            raise ConfigurationError(
                f"{self!r}: {num_shards} shards cannot be cut from {len(labels)} samples. Lower num_clients or "
                f"shards_per_client so that their product is at most {len(labels)}."
            )
        # Shuffled first, so that which samples of a class share a shard does not depend on their order in the file.
        order = shuffled(torch.arange(len(labels)), generator)
        order = order[labels[order].argsort(stable=True)]
        shards = order.tensor_split(num_shards)
        deal = torch.randperm(num_shards, generator=generator).tolist()
        return [
            torch.cat([shards[shard] for shard in deal[client :: self.num_clients]])
            for client in range(self.num_clients)
        ]
