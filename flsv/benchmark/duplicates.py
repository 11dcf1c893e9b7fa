"""Data sets in which a few samples are repeated many times."""

from __future__ import annotations

import torch
from torch import Tensor

from flsv.data import Corruption
from flsv.errors import ConfigurationError


class Duplicates(Corruption):
    """Clients that repeat a few of their samples until they have as many as they claim.

    The first ``ceil(unique * n)`` samples of a random order stay, the others become copies of them in turn. A client
    counts all of them.

    Args:
        unique: share of a client's samples that are its own, above 0 and at most 1; at least one sample is.
        clients: whom it concerns, see :class:`flsv.data.ClientChoice`.
        fraction: likewise.
        seed: seed of the choice of clients and samples.

    Raises:
        ConfigurationError: a share out of range.

    Example:
        >>> x, y = torch.arange(10.0)[:, None], torch.arange(10)
        >>> copies, _ = Duplicates(unique=0.2)(x, y, num_classes=10, generator=torch.Generator().manual_seed(0))
        >>> len(copies), len(copies.unique())
        (10, 2)
    """

    needs_classes = False

    def __init__(
        self,
        unique: float = 0.2,
        clients: list[int] | None = None,
        fraction: float | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(clients, fraction, seed)
        self.unique = unique
        if not 0 < unique <= 1:
            raise ConfigurationError(f"{self!r}: unique is a share above 0 and at most 1; 0.1 is 10 %.")

    def corrupt(self, x: Tensor, y: Tensor, num_classes: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        own = max(1, -int(-self.unique * len(x) // 1))
        order = torch.randperm(len(x), generator=generator)
        source = order.clone()
        source[order] = order[torch.arange(len(x)) % own]
        return x[source], y[source]
