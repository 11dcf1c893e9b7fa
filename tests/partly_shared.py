"""A federation that shares a part of its model."""

from __future__ import annotations

from typing import Any

from by_hand import LOCAL_EPOCHS, SEED
from torch import nn
from toys import network

from flsv.loop import FederatedLoop
from flsv.sampling import UniformSampler

NORM, HEAD = ["1.weight", "1.bias", "1.running_mean", "1.running_var", "1.num_batches_tracked"], ["4.weight", "4.bias"]


def loop(**kwargs: Any) -> FederatedLoop:
    options: dict[str, Any] = {"sampler": UniformSampler(3), "local_epochs": LOCAL_EPOCHS, "seed": SEED, **kwargs}
    return FederatedLoop(**options)


def frozen(batch_norm: bool = True) -> nn.Module:
    net = network(batch_norm)
    net[:2].requires_grad_(False)
    return net
