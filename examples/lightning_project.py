"""An existing Lightning project, and the same project federated.

    python examples/lightning_project.py             # as it was: one Trainer, all data in one place
    python examples/lightning_project.py --clients 5 # federated: the same module, the same data module

``Autoencoder`` and ``Digits`` are what a project has before it has heard of flsv, and stay as they are. Without labels,
classes or accuracy, contributions are measured by what the module logs when it validates: Shapley values over all
coalitions of clients, each trained by a fit of its own. The script takes a few seconds.
"""

from __future__ import annotations

import argparse

import lightning as L
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from flsv import FederatedDataModule, FederatedLoop
from flsv.data import SizePartitioner
from flsv.metrics import ShadowShapley


class Autoencoder(L.LightningModule):
    """Images in, images out, through eight numbers."""

    def __init__(self, width: int = 32, code: int = 8) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.encoder = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, code))
        self.decoder = nn.Sequential(nn.Linear(code, width), nn.ReLU(), nn.Linear(width, 64))

    def loss(self, batch: list[Tensor]) -> Tensor:
        (images,) = batch
        return nn.functional.mse_loss(self.decoder(self.encoder(images)), images)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=2e-3)


class Digits(L.LightningDataModule):
    """scikit-learn's digits as vectors of 64 numbers."""

    def setup(self, stage: str) -> None:
        images = torch.tensor(load_digits().data, dtype=torch.float32) / 16
        self.train, self.val = TensorDataset(images[:1500]), TensorDataset(images[1500:])

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.train, batch_size=32, shuffle=True)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.val, batch_size=256)


def main(clients: int, epochs: int) -> float:
    L.seed_everything(0)
    module, data = Autoencoder(), Digits()
    options = {"max_epochs": epochs, "accelerator": "cpu", "default_root_dir": "runs/project"}
    if not clients:
        trainer = L.Trainer(**options)
        trainer.fit(module, data)
    else:  # what federating the project takes
        value = ShadowShapley(coalitions="all", performance="val_loss", mode="min")
        loop = FederatedLoop(metrics={"value": value})
        trainer = L.Trainer(callbacks=[loop], **options)
        trainer.fit(module, FederatedDataModule(data, SizePartitioner(list(range(1, clients + 1)))))
        print(
            "contributions:",
            [round(value, 4) for value in loop.metrics["value"].compute().tolist()],
        )
    loss = float(trainer.callback_metrics["val_loss"])
    print(f"val_loss {loss:.4f}")
    return loss


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--clients", type=int, default=0, help="0: not federated")
    parser.add_argument("--epochs", type=int, default=10, help="or rounds")
    options = parser.parse_args()
    main(options.clients, options.epochs)
