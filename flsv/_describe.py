"""What a fit says of itself: to its strategies, and to the loggers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import lightning as L
import torch

from flsv.data import FederatedDataModule
from flsv.strategy import Federation

if TYPE_CHECKING:
    from flsv.loop import FederatedLoop


def federation(loop: FederatedLoop, module: L.LightningModule, data: FederatedDataModule, seed: int) -> Federation:
    """What strategies know before the first round."""
    clients = range(data.num_clients)
    sizes = {
        split: torch.tensor([len(data.client_indices(client, split)) for client in clients])
        for split in ("train", "val", "test")
    }
    return Federation(loop.space.read(module), loop.space, data.num_clients, data.num_classes, sizes, seed)


def settings(loop: FederatedLoop, data: FederatedDataModule, seed: int) -> dict[str, Any]:
    """The run's hyper-parameters, flat."""
    result: dict[str, Any] = {
        "local_epochs": loop.local_epochs,
        "server_lr": loop.server_lr,
        "client_optimizer": loop.client_optimizer,
        "federation_seed": seed,
    }
    result |= {role: repr(strategy) for role, strategy in loop.strategies.items()}
    result |= {"attacks": repr(loop.attacks)} if loop.attacks else {}
    result |= {"privacy": repr(loop.privacy)} if loop.privacy is not None else {}
    result |= {f"metric/{name}": repr(metric) for name, metric in loop.metrics.items()}
    return {**result, **{f"data/{name}": value for name, value in data.describe().items()}}
