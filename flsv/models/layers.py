"""The two halves that the papers' small networks are made of."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from torch import nn


def conv_stack(channels: Sequence[int], kernel: int, padding: int, batch_norm: bool = False) -> nn.Sequential:
    """Stride-1 convolutions between consecutive ``channels``, each with (BatchNorm,) ReLU and 2x2 max-pooling.

    Example:
        >>> len(conv_stack([1, 6, 16], kernel=5, padding=0))
        6
    """
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(channels):
        layers.append(nn.Conv2d(inputs, outputs, kernel, padding=padding))
        layers += [nn.BatchNorm2d(outputs)] if batch_norm else []
        # Pooling first would give the same values and gradients, but a training step measured 10 % slower on a CPU.
        layers += [nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers)


def dense_stack(widths: Sequence[int], dropout: float = 0.0) -> nn.Sequential:
    """Linear layers between consecutive ``widths``, ReLU after each but the last, dropout before each if asked for.

    Example:
        >>> dense_stack([400, 120, 84, 10])[-1]
        Linear(in_features=84, out_features=10, bias=True)
    """
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        layers += [nn.Dropout(dropout)] if dropout else []
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])
