"""Classification and regression as templates have it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import lightning as L
import torch
from compat.kinds.base import Kind, Sets, images, table
from torch import Tensor, nn
from torchmetrics import MaxMetric, MeanMetric
from torchmetrics.classification import MulticlassAccuracy


def _net(outputs: int, inputs: int = 5) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(inputs, 12), nn.Tanh(), nn.Linear(12, outputs))


class Template(L.LightningModule):
    """As lightning-hydra-template's: the network, the optimizer and its schedule are given, metrics are its own."""

    def __init__(
        self,
        net: nn.Module,
        optimizer: Callable[..., torch.optim.Optimizer],
        scheduler: Callable[..., Any] | None,
        compile: bool,
    ) -> None:
        super().__init__()
        self.save_hyperparameters(logger=False, ignore=["net"])
        self.net = net
        self.criterion = nn.CrossEntropyLoss()
        self.train_acc, self.val_acc = (MulticlassAccuracy(3) for _ in range(2))
        self.train_loss, self.val_loss = MeanMetric(), MeanMetric()
        self.val_acc_best = MaxMetric()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def on_train_start(self) -> None:
        self.val_loss.reset()
        self.val_acc.reset()
        self.val_acc_best.reset()

    def model_step(self, batch: Any) -> tuple[Tensor, Tensor, Tensor]:
        x, y = batch
        logits = self.forward(x)
        return self.criterion(logits, y), logits.argmax(1), y

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss, predictions, targets = self.model_step(batch)
        self.train_loss(loss)
        self.train_acc(predictions, targets)
        self.log("train/loss", self.train_loss, on_step=False, on_epoch=True, prog_bar=True)
        self.log("train/acc", self.train_acc, on_step=False, on_epoch=True, prog_bar=True)
        return loss

    def on_train_epoch_end(self) -> None:
        pass

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        loss, predictions, targets = self.model_step(batch)
        self.val_loss(loss)
        self.val_acc(predictions, targets)
        self.log("val/loss", self.val_loss, on_step=False, on_epoch=True, prog_bar=True)
        self.log("val/acc", self.val_acc, on_step=False, on_epoch=True, prog_bar=True)

    def on_validation_epoch_end(self) -> None:
        self.val_acc_best(self.val_acc.compute())
        self.log("val/acc_best", self.val_acc_best.compute(), sync_dist=True, prog_bar=True)

    def setup(self, stage: str) -> None:
        if self.hparams.compile and stage == "fit":
            self.net = torch.compile(self.net, backend="eager")

    def configure_optimizers(self) -> Any:
        optimizer = self.hparams.optimizer(params=self.trainer.model.parameters())
        if self.hparams.scheduler is None:
            return {"optimizer": optimizer}
        return {
            "optimizer": optimizer,
            "lr_scheduler": {
                "scheduler": self.hparams.scheduler(optimizer=optimizer),
                "interval": "epoch",
                "frequency": 1,
            },
        }


def template(compile: bool = False) -> Template:
    halved = partial(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.5)
    return Template(_net(3, 64), partial(torch.optim.Adam, lr=1e-2), halved, compile)


class Supervised(L.LightningModule):
    """One network and one loss; validation logs the loss."""

    def __init__(self, outputs: int, loss: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.net, self.loss = _net(outputs), loss

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def _step(self, batch: Any) -> tuple[Tensor, Tensor, Tensor]:
        x, y = batch
        out = self(x).squeeze(-1)
        return self.loss(out, y), out, y

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self._step(batch)[0]

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self._step(batch)[0])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class SeveralLoaders(Supervised):
    """Validates on two sets, which Lightning names."""

    def __init__(self) -> None:
        super().__init__(1, nn.functional.mse_loss)

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("val_loss", self._step(batch)[0])


class ManualAccumulation(Supervised):
    """The accumulation of Lightning's guide to manual optimization: a step after every n-th batch."""

    def __init__(self, every: int = 2) -> None:
        super().__init__(1, nn.functional.mse_loss)
        self.automatic_optimization, self.every = False, every

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        optimizer = self.optimizers()
        loss = self._step(batch)[0] / self.every
        self.manual_backward(loss)
        if (batch_idx + 1) % self.every == 0:
            optimizer.step()
            optimizer.zero_grad()
        return loss


def _numbers(x: Tensor) -> Tensor:
    return x[:, 0] - 0.5 * x[:, 1] * x[:, 2]


def _several_loaders() -> Sets:
    data, other = table(_numbers), table(_numbers, val=20, seed=2)
    return Sets(data.train, [*data.val, *other.val])


KINDS = {
    "hydra-template": Kind(template, images, logged="val/loss"),
    "hydra-template-compiled": Kind(lambda: template(compile=True), images, logged="val/loss", by_hand=template),
    "regression": Kind(lambda: Supervised(1, nn.functional.mse_loss), lambda: table(_numbers)),
    "several-val-loaders": Kind(SeveralLoaders, _several_loaders, logged="val_loss/dataloader_idx_1"),
    # 5 and 2 batches: a window of one client's last batch must not end with the next one's first.
    "manual-accumulation": Kind(ManualAccumulation, lambda: table(_numbers, samples=52), clients=(5, 2)),
}
