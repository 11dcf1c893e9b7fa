"""What the checks of ``tools/gpu_checks.py`` train: a convolution, a transformer, and images of four classes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from flsv import FederatedDataModule

CLASSES, CLIENTS, BATCH = 4, 3, 8


class Attention(nn.Module):
    """A block of a transformer that reads an image's rows."""

    def __init__(self, width: int = 16, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.read, self.place = nn.Linear(8, width), nn.Parameter(torch.zeros(8, width))
        self.norm, self.three, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.read(x.squeeze(1)) + self.place
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(-2, -3) for part in self.three(self.norm(x)).chunk(3, -1)
        )
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(-2, -3).flatten(-2))
        return self.head((x + self.wide(x)).mean(-2))


def convolution() -> nn.Module:
    layers = [
        nn.Conv2d(1, 8, 3, padding=1),
        nn.GroupNorm(2, 8),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 8, 3),
        nn.ReLU(),
    ]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(32, CLASSES))


def wide() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 4096), nn.ReLU(), nn.Linear(4096, 2048), nn.Linear(2048, CLASSES))


NETWORKS: dict[str, Callable[[], nn.Module]] = {"convolution": convolution, "transformer": Attention}


class Module(L.LightningModule):
    """As a user writes it."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = {**NETWORKS, "wide": wide}[kind]()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", F.cross_entropy(self(batch[0]), batch[1]))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


def images(count: int, seed: int = 0) -> TensorDataset:
    draw = torch.Generator().manual_seed(seed)
    means = torch.randn(CLASSES, 1, 8, 8, generator=torch.Generator().manual_seed(9))
    y = torch.arange(count) % CLASSES
    return TensorDataset(means[y] + torch.randn(count, 1, 8, 8, generator=draw), y)


def data(batches: int = 4, clients: int = CLIENTS) -> FederatedDataModule:
    own = {str(client): images(batches * BATCH, client) for client in range(clients)}
    return FederatedDataModule(clients=own, val=images(40, 7), batch_size=BATCH)
