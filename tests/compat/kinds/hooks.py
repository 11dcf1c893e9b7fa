"""Modules that use much of what a LightningModule may: its hooks, its Trainer, its hyperparameters."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from compat.kinds.base import Kind, Sets, images
from compat.kinds.small import Small
from lightning.pytorch.callbacks import LambdaCallback
from torch import Tensor, nn


class KnowsItsClasses(Sets):
    """A data module with attributes that the module asks for, and with a batch hook of its own."""

    def __init__(self) -> None:
        like = images()
        super().__init__(like.train, like.val)
        self.outputs, self.scale = 3, 0.5

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        x, y = batch
        return x * self.scale, y


class Hooked(L.LightningModule):
    """Its layers come in ``configure_model``, its dimensions from the data module, callbacks of its own."""

    def __init__(self, width: int = 12, dropout: float = 0.2) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.example_input_array = torch.zeros(2, 1, 8, 8)
        self.net: nn.Module | None = None
        self.seen: list[str] = []

    def configure_model(self) -> None:
        if self.net is None:
            torch.manual_seed(0)
            width, outputs = self.hparams.width, self.trainer.datamodule.outputs
            layers = [nn.Flatten(), nn.Linear(64, width), nn.ReLU(), nn.Dropout(self.hparams.dropout)]
            self.net = nn.Sequential(*layers, nn.Linear(width, outputs))

    def configure_callbacks(self) -> Any:
        return [LambdaCallback(on_train_start=lambda trainer, module: module.seen.append("callback"))]

    def on_fit_start(self) -> None:
        self.register_buffer("scale", torch.full((), 0.5), persistent=False)

    def on_train_epoch_start(self) -> None:
        self.seen.append(f"epoch {self.current_epoch}")

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        x, y = batch
        return x.float(), y

    def forward(self, x: Tensor) -> Tensor:
        assert self.net is not None
        return self.net(x * self.scale)

    def _loss(self, batch: Any) -> Tensor:
        x, y = batch
        return nn.functional.cross_entropy(self(x), y)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self._loss(batch) * (1 + self.current_epoch)

    def on_after_backward(self) -> None:
        for p in self.parameters():
            p.grad.mul_(0.5)

    def configure_gradient_clipping(self, optimizer: Any, gradient_clip_val: Any = None, **kwargs: Any) -> None:
        self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        scheduler.step()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self._loss(batch))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["seen"] = self.seen

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.seen = checkpoint["seen"]


class Fetches(Small):
    """Gets its batches itself."""

    def training_step(self, dataloader_iter: Any) -> Tensor:  # type: ignore[override]
        batch, _, _ = next(dataloader_iter)
        return self._loss(batch)


class Skips(Small):
    """Leaves some batches out."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:  # type: ignore[override]
        return None if batch_idx == 1 else self._loss(batch)


class OddParts(Small):
    """An empty parameter, a whole number among the parameters, layers that get no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.nothing = nn.Parameter(torch.empty(0))
        self.number = nn.Parameter(torch.tensor(3), requires_grad=False)
        self.idle = nn.Linear(3, 3)


class CollectsOutputs(Small):
    """Keeps what its steps give for the end of the epoch, which is the round's."""

    def __init__(self) -> None:
        super().__init__()
        self.outputs: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.outputs.append(loss.detach())
        return loss

    def on_train_epoch_end(self) -> None:
        self.log("train_loss_epoch_mean", torch.stack(self.outputs).mean())
        self.outputs.clear()


KINDS = {
    "hooks": Kind(Hooked, KnowsItsClasses),
    "dataloader-iter": Kind(Fetches, images),
    "skipped-batches": Kind(Skips, images),
    "odd-parts": Kind(OddParts, images),
    "collected-outputs": Kind(CollectsOutputs, images),
}
