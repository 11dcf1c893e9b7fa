"""SignFlip: updates with the sign reversed.

The "sign-flipping" attack of Li et al., "RSA: Byzantine-Robust Stochastic Aggregation Methods for Distributed Learning
from Heterogeneous Datasets", AAAI 2019.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flsv.attacks.base import Attack
from flsv.uploads.base import UploadContext
from flsv.utilities.declared import Positive


class SignFlip(Attack):
    """Attack that multiplies the update by ``-scale``. This step increases the client's own loss.

    Args:
        scale: factor above 0. 1 leaves the norm unchanged.
        clients: the clients that attack, see :class:`flsv.data.ClientChoice`.
        fraction: their share, instead of ``clients``.
        seed: seed of their choice.

    Raises:
        ConfigurationError: the scale is not positive and finite.

    Example:
        >>> SignFlip().attack(torch.tensor([1.0, -2.0]), None, torch.Generator())
        tensor([-1.,  2.])
    """

    def __init__(
        self,
        scale: Positive = 1.0,
        clients: list[int] | None = None,
        fraction: float | None = None,
        seed: int | None = None,
    ) -> None:
        super().__init__(clients, fraction, seed)
        self.scale = scale

    def attack(self, update: Tensor, context: UploadContext, generator: torch.Generator) -> Tensor:
        return update * -self.scale
