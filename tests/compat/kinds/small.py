"""A small classifier with BatchNorm, dropout and whatever schedule is asked for: to try a Trainer's options on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn

MakeScheduler = Callable[[torch.optim.Optimizer, L.Trainer], Any]


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


class Small(L.LightningModule):
    """Knows nothing of a federation."""

    def __init__(
        self,
        scheduler: MakeScheduler | None = None,
        interval: str = "step",
        frequency: int = 1,
        optimizer: Callable[[Any], torch.optim.Optimizer] = sgd,
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers = [nn.Flatten(), nn.Linear(64, 12, bias=False), nn.BatchNorm1d(12), nn.ReLU(), nn.Dropout(0.2)]
        self.net = nn.Sequential(*layers, nn.Linear(12, 3))
        self.make_optimizer, self.make_scheduler = optimizer, scheduler
        self.interval, self.frequency = interval, frequency

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def _loss(self, batch: Any) -> Tensor:
        x, y = batch
        return nn.functional.cross_entropy(self(x), y)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self._loss(batch)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self._loss(batch), prog_bar=True)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", self._loss(batch))

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch[0]).argmax(1)

    def configure_optimizers(self) -> Any:
        optimizer = self.make_optimizer(self.parameters())
        if self.make_scheduler is None:
            return optimizer
        scheduler = self.make_scheduler(optimizer, self.trainer)
        return [optimizer], [{"scheduler": scheduler, "interval": self.interval, "frequency": self.frequency}]


class ManualSchedule(Small):
    """Steps its optimizer and its schedule by hand."""

    def __init__(self, scheduler: MakeScheduler) -> None:
        super().__init__(scheduler)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        optimizer, loss = self.optimizers(), self._loss(batch)
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        self.lr_schedulers().step()
        return loss
