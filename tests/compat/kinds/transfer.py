"""Networks of which a part is frozen, for a while or for good."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from compat.kinds.base import Kind, images
from lightning.pytorch.callbacks import BackboneFinetuning, BaseFinetuning
from torch import Tensor, nn


class Transferred(L.LightningModule):
    """A backbone and a head; the callback says when the backbone trains."""

    def __init__(self, frozen: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.backbone = nn.Sequential(nn.Flatten(), nn.Linear(64, 16, bias=False), nn.BatchNorm1d(16), nn.ReLU())
        self.head = nn.Linear(16, 3)
        if frozen:
            self.backbone.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.backbone(x))

    def _loss(self, batch: Any) -> Tensor:
        x, y = batch
        return nn.functional.cross_entropy(self(x), y)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self._loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self._loss(batch))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1, momentum=0.9)


class Unfreeze(BaseFinetuning):
    """From the second round on the backbone trains, too, at a tenth of the rate."""

    def freeze_before_training(self, module: Any) -> None:
        self.freeze(module.backbone)

    def finetune_function(self, module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(module.backbone, optimizer)


KINDS = {
    "finetuning": Kind(Transferred, images, callbacks=lambda: [Unfreeze()]),
    "backbone-finetuning": Kind(
        Transferred, images, callbacks=lambda: [BackboneFinetuning(1, lambda epoch: 2.0, backbone_initial_ratio_lr=0.1)]
    ),
    "frozen-backbone": Kind(lambda: Transferred(frozen=True), images),
}
