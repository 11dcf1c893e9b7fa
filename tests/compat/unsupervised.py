"""Modules that learn without labels: adversarial networks, two views of a picture."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import lightning as L
import task_kinds
import torch
from compat.base import Sets, drawn
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm
from torch.utils.data import Dataset

PIXELS, LATENT, WIDTH = 64, 4, 16


def _mlp(*widths: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for a, b in itertools.pairwise(widths):
        layers += [nn.Linear(a, b), nn.LeakyReLU(0.2)]
    return nn.Sequential(*layers[:-1])


class GAN(L.LightningModule):
    """Two optimizers by hand, the generator's in every third batch, and weights that are normalized."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        torch.manual_seed(0)
        self.generator, self.discriminator = _mlp(LATENT, 16, PIXELS), _mlp(PIXELS, 16, 1)
        for place in (0, 2):
            spectral_norm(self.discriminator[place])
        weight_norm(self.generator[2])

    def _judged(self, x: Tensor, real: bool) -> Tensor:
        verdict = self.discriminator(x)
        return nn.functional.binary_cross_entropy_with_logits(verdict, torch.full_like(verdict, float(real)))

    def _step(self, optimizer: Any, name: str, loss: Any) -> None:
        self.toggle_optimizer(optimizer)
        value = loss()
        self.log(name, value)
        self.manual_backward(value)
        optimizer.step()
        optimizer.zero_grad()
        self.untoggle_optimizer(optimizer)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        real = batch[0].flatten(1)
        for_generator, for_discriminator = self.optimizers()
        z = torch.randn(len(real), LATENT)
        if (batch_idx + 1) % 3 == 0:
            self._step(for_generator, "g_loss", lambda: self._judged(self.generator(z), real=True))

        def judges() -> Tensor:
            return (self._judged(real, real=True) + self._judged(self.generator(z).detach(), real=False)) / 2

        self._step(for_discriminator, "d_loss", judges)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self._judged(batch[0].flatten(1), real=True))

    def configure_optimizers(self) -> Any:
        parts = (self.generator, self.discriminator)
        return [torch.optim.Adam(part.parameters(), lr=2e-3, betas=(0.5, 0.999)) for part in parts], []


# ---- self-supervised learning from two views of a picture


class TwoViews(Dataset):
    """Views drawn when a sample is read, from the global generator, as torchvision's transforms draw."""

    def __init__(self, samples: int, seed: int, fixed: bool = False) -> None:
        self.x, self.fixed = torch.randn(samples, 1, 8, 8, generator=drawn(seed)), fixed
        self.targets = torch.arange(samples) % 3

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
        return (self._view(self.x[index]), self._view(self.x[index])), self.targets[index]

    def _view(self, x: Tensor) -> Tensor:
        if self.fixed:
            return x + 0.1 * x.flip(-1)
        return x.roll(int(torch.randint(0, 8, ())), -1) + 0.1 * torch.randn_like(x)


def views() -> Sets:
    return Sets(TwoViews(44, 0), TwoViews(12, 1, fixed=True))


@torch.no_grad()
def _follow(slow: nn.Module, fast: nn.Module) -> None:
    for p, q in zip(slow.parameters(), fast.parameters()):
        p.mul_(0.9).add_(q, alpha=0.1)


class BYOL(task_kinds.Kind):
    """The target network follows the online one after every batch, by a hook."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers = [nn.Flatten(), nn.Linear(PIXELS, WIDTH, bias=False), nn.BatchNorm1d(WIDTH), nn.ReLU()]
        self.online = nn.Sequential(*layers, nn.Linear(WIDTH, LATENT))
        self.target = copy.deepcopy(self.online).requires_grad_(False)
        self.predictor = nn.Linear(LATENT, LATENT)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        _follow(self.target, self.online)

    def loss(self, batch: Any) -> Tensor:
        (a, b), _ = batch
        alike = nn.functional.cosine_similarity
        return -sum(alike(self.predictor(self.online(x)), self.target(y)).mean() for x, y in ((a, b), (b, a)))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([*self.online.parameters(), *self.predictor.parameters()], lr=0.1)


class MoCo(L.LightningModule):
    """Negatives from a queue of what earlier batches gave, in buffers that no checkpoint holds."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers = [nn.Flatten(), nn.Linear(PIXELS, WIDTH), nn.ReLU(), nn.Linear(WIDTH, LATENT)]
        self.query = nn.Sequential(*layers)
        self.key = copy.deepcopy(self.query).requires_grad_(False)
        queue = nn.functional.normalize(torch.randn(16, LATENT), dim=1)
        self.register_buffer("queue", queue, persistent=False)
        self.register_buffer("pointer", torch.zeros(1, dtype=torch.long), persistent=False)

    def _loss(self, batch: Any) -> tuple[Tensor, Tensor]:
        (a, b), _ = batch
        q, k = (nn.functional.normalize(net(x), dim=1) for net, x in ((self.query, a), (self.key, b)))
        logits = torch.cat([(q * k).sum(1, keepdim=True), q @ self.queue.clone().T], dim=1) / 0.2
        return nn.functional.cross_entropy(logits, torch.zeros(len(q), dtype=torch.long)), k.detach()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        _follow(self.key, self.query)
        loss, k = self._loss(batch)
        self.queue[(int(self.pointer) + torch.arange(len(k))) % len(self.queue)] = k
        self.pointer[0] = (int(self.pointer) + len(k)) % len(self.queue)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self._loss(batch)[0])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.query.parameters(), lr=0.05, momentum=0.9)
