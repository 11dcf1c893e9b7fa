"""The samples themselves as features."""

from __future__ import annotations

from torch import Tensor, nn

from flsv.features.base import Features


class Pixels(Features):
    """The inputs as the network sees them, flattened: d is the product of a sample's shape.

    Example:
        >>> import torch
        >>> Pixels()(torch.zeros(2, 1, 8, 8)).shape
        torch.Size([2, 64])
    """

    def __call__(self, x: Tensor, module: nn.Module | None = None) -> Tensor:
        return x.flatten(1).float()

    def __repr__(self) -> str:
        return "Pixels()"
