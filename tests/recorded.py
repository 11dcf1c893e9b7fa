"""What a loop gives a metric, round by round, and a regression without classes."""

import lightning as L
import torch
from torch import Tensor, nn

from flsv.metrics import ContributionMetric


class Recorded(ContributionMetric):
    """What a loop gives."""

    per_class = False

    def init_states(self, num_clients: int, num_classes: int | None) -> None:
        self.seen: list[tuple[Tensor, ...]] = []

    def update(self, client_ids: Tensor, global_vector: Tensor, client_updates: Tensor, num_samples: Tensor) -> None:
        self.seen.append((client_ids.clone(), global_vector.clone(), client_updates.clone(), num_samples.clone()))

    def compute(self) -> Tensor:
        return torch.zeros(self.num_clients or 0)


class Line(L.LightningModule):
    """Predicts the mean pixel: a regression, which logs its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 1)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x = batch[0].flatten(1)
        return nn.functional.mse_loss(self.layer(x).squeeze(1), x.mean(1))

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.training_step(batch, batch_idx))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)
