"""All data to one client: those of a site."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flsv.data.partition.base import Partitioner


class OneClient(Partitioner):
    """No partition: the data are one participant's own, which trains with others in other processes.

    Args:
        seed: taken for uniformity; nothing here is random.

    Attributes:
        first_client: which client of the federation this participant is: its validation and test samples are drawn as
            they would be drawn for that client in one process. A site is told by its server.

    Example:
        >>> OneClient()(torch.tensor([0, 1, 0]), num_classes=2)
        [tensor([0, 1, 2])]
    """

    needs_classes = False

    def __init__(self, seed: int = 0) -> None:
        self.num_clients, self.seed = 1, seed

    def partition(
        self, labels: Tensor, num_classes: int, groups: Tensor | None, generator: torch.Generator
    ) -> Sequence[Tensor]:
        return [torch.arange(len(labels))]
