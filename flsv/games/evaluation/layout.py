"""Channels-last memory layout, in which convolutions and pooling are fastest on a CPU.

Pooling has vectorised kernels for this layout only. Measured on one core, LeNet5 takes 0.7 of its time, ShapFed's CNN
0.4 and ResNet-18 all of it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flsv.games.evaluation.batches import ValidationBatches
from flsv.games.evaluation.replica import Replica


def in_channels_last(replica: Replica, batches: ValidationBatches) -> Replica | None:
    """A twin of the replica in this layout, if its network is convolutional and works in it; else None.

    Networks that flatten with ``view`` do not: they expect the default layout.
    """
    x, y = batches[0]
    convolutional = any(parameter.ndim == 4 for parameter in replica.module.parameters())
    if not convolutional or not isinstance(x, Tensor) or x.ndim != 4:
        return None
    x, y, classes = x[:2], y[:2], len(batches.support)
    twin = replica.twin()
    twin.module.to(memory_format=torch.channels_last)
    try:
        found = twin.logits(x.contiguous(memory_format=torch.channels_last), y, classes)
    except RuntimeError:
        return None
    same = torch.allclose(found, replica.logits(x, y, classes), rtol=1e-2, atol=1e-3, equal_nan=True)
    return twin if same else None
