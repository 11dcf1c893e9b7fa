"""Self-supervised learning from two views of a picture."""

from __future__ import annotations

import copy
from typing import Any

import lightning as L
import torch
from compat.kinds.base import Kind, Sets, drawn
from torch import Tensor, nn
from torch.utils.data import Dataset

PIXELS, WIDTH, DIM = 64, 16, 4


def _encoder(batch_norm: bool = True) -> nn.Sequential:
    norm = nn.BatchNorm1d(WIDTH) if batch_norm else nn.Identity()
    return nn.Sequential(nn.Flatten(), nn.Linear(PIXELS, WIDTH, bias=not batch_norm), norm, nn.ReLU())


class TwoViews(Dataset):
    """Views drawn when a sample is read, from the global generator, as torchvision's transforms draw."""

    def __init__(self, samples: int, seed: int) -> None:
        self.x = torch.randn(samples, 1, 8, 8, generator=drawn(seed))
        self.targets = torch.arange(samples) % 3

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
        x = self.x[index]
        return (self._view(x), self._view(x)), self.targets[index]

    @staticmethod
    def _view(x: Tensor) -> Tensor:
        shifted = x.roll(int(torch.randint(0, 8, ())), -1)
        return shifted + 0.1 * torch.randn_like(x)


class FixedViews(TwoViews):
    """For validation: the same views whenever a sample is read."""

    @staticmethod
    def _view(x: Tensor) -> Tensor:
        return x + 0.1 * x.flip(-1)


def views() -> Sets:
    return Sets(TwoViews(44, 0), FixedViews(12, 1))


class BYOL(L.LightningModule):
    """The target network follows the online one after every batch, by a hook."""

    def __init__(self, tau: float = 0.9, hook: str = "on_train_batch_end") -> None:
        super().__init__()
        self.tau, self.hook = tau, hook
        torch.manual_seed(0)
        self.online = nn.Sequential(_encoder(), nn.Linear(WIDTH, DIM))
        self.target = copy.deepcopy(self.online).requires_grad_(False)
        self.predictor = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return self.online(x)

    @torch.no_grad()
    def _follow(self) -> None:
        for slow, fast in zip(self.target.parameters(), self.online.parameters()):
            slow.mul_(self.tau).add_(fast, alpha=1 - self.tau)

    def on_before_zero_grad(self, optimizer: Any) -> None:
        if self.hook == "on_before_zero_grad":
            self._follow()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.hook == "on_train_batch_end":
            self._follow()

    def _loss(self, batch: Any) -> Tensor:
        (a, b), _ = batch
        loss: Any = 0
        for x, other in ((a, b), (b, a)):
            loss = loss - nn.functional.cosine_similarity(self.predictor(self(x)), self.target(other)).mean()
        return loss

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self._loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self._loss(batch))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([*self.online.parameters(), *self.predictor.parameters()], lr=0.1)


class MoCo(L.LightningModule):
    """Negatives from a queue of what earlier batches gave, in buffers that a checkpoint holds or does not."""

    def __init__(self, persistent: bool, length: int = 16, momentum: float = 0.9) -> None:
        super().__init__()
        self.momentum = momentum
        torch.manual_seed(0)
        self.query = nn.Sequential(_encoder(batch_norm=False), nn.Linear(WIDTH, DIM))
        self.key = copy.deepcopy(self.query).requires_grad_(False)
        queue = nn.functional.normalize(torch.randn(length, DIM), dim=1)
        self.register_buffer("queue", queue, persistent=persistent)
        self.register_buffer("pointer", torch.zeros(1, dtype=torch.long), persistent=persistent)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.normalize(self.query(x), dim=1)

    def _loss(self, q: Tensor, k: Tensor) -> Tensor:
        logits = torch.cat([(q * k).sum(1, keepdim=True), q @ self.queue.clone().T], dim=1) / 0.2
        return nn.functional.cross_entropy(logits, torch.zeros(len(q), dtype=torch.long))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        (a, b), _ = batch
        with torch.no_grad():
            for slow, fast in zip(self.key.parameters(), self.query.parameters()):
                slow.mul_(self.momentum).add_(fast, alpha=1 - self.momentum)
            k = nn.functional.normalize(self.key(b), dim=1)
        loss = self._loss(self(a), k)
        with torch.no_grad():
            places = (int(self.pointer) + torch.arange(len(k))) % len(self.queue)
            self.queue[places] = k
            self.pointer[0] = (int(self.pointer) + len(k)) % len(self.queue)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        (a, b), _ = batch
        self.log("val_loss", self._loss(self(a), nn.functional.normalize(self.key(b), dim=1)))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.query.parameters(), lr=0.05, momentum=0.9)


KINDS = {
    "byol": Kind(BYOL, views),
    "byol-before-zero-grad": Kind(lambda: BYOL(hook="on_before_zero_grad"), views),
    "moco": Kind(lambda: MoCo(persistent=True), views),
    "moco-non-persistent": Kind(lambda: MoCo(persistent=False), views),
}
