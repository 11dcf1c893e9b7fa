"""What a kind of module is here, data of every shape, and a small classifier to try a Trainer's options on."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from flsv.data import FederatedDataModule, SizePartitioner
from helpers import make_generator, tasks
from helpers.models import sgd


@dataclass(frozen=True)
class Kind:
    """A module as public Lightning projects have it, the data that it trains on, and what its Trainer is given.

    Attributes:
        module: makes one, always of the same weights.
        data: makes the data module, always with the same samples.
        callbacks: makes the project's own.
        trainer: the Trainer's arguments.
        logged: what ``validation_step`` logs, to be made small.
        tolerance: to which the global model after the last round is that of the loop by hand.
        clients: how many samples they have, up to a factor.
    """

    module: Callable[[], L.LightningModule]
    data: Callable[[], L.LightningDataModule]
    callbacks: Callable[[], Sequence[L.Callback]] = list
    trainer: dict[str, Any] = field(default_factory=dict)
    logged: str = "val_loss"
    tolerance: float = 1e-6
    clients: tuple[int, ...] = (2, 1)


class Sets(L.LightningDataModule):
    """A project's data module: a training set, and one validation set or several."""

    def __init__(self, train, *val):
        super().__init__()
        self.train = train
        self.val = val

    def train_dataloader(self):
        return DataLoader(self.train, batch_size=8, shuffle=True)

    def val_dataloader(self):
        loaders = [DataLoader(samples, batch_size=8) for samples in self.val]
        return loaders if len(loaders) > 1 else loaders[0]


def make_federated_data(kind):
    """The kind's data, dealt to its clients."""
    return FederatedDataModule(kind.data(), SizePartitioner(list(kind.clients)))


NUM_PIXELS = 8  # of an image's rows and columns


def make_images():
    """Noisy stripes of three widths."""
    generator = make_generator()
    return Sets(make_stripes(44, generator), make_stripes(12, generator))


def make_stripes(n, generator):
    """Images ``[n, 1, NUM_PIXELS, NUM_PIXELS]``, all rows of which are one wave and noise."""
    y = torch.arange(n) % 3
    frequencies = y[:, None] + 1.0
    waves = torch.sin(torch.arange(NUM_PIXELS) * frequencies)
    images = waves[:, None, None, :].expand(n, 1, NUM_PIXELS, NUM_PIXELS)
    noise = torch.randn(n, 1, NUM_PIXELS, NUM_PIXELS, generator=generator)
    return TensorDataset(images + 0.3 * noise, y)


class Small(tasks.Kind):
    """With BatchNorm, dropout and whatever schedule is asked for. Knows nothing of a federation."""

    def __init__(
        self,
        scheduler=None,
        interval="step",
        frequency=1,
        optimizer=sgd,
    ):
        super().__init__()
        torch.manual_seed(0)
        layers = [
            nn.Flatten(),
            nn.Linear(64, 12, bias=False),
            nn.BatchNorm1d(12),
            nn.ReLU(),
            nn.Dropout(0.2),
        ]
        self.net = nn.Sequential(*layers, nn.Linear(12, 3))
        self.make_optimizer = optimizer
        self.make_scheduler = scheduler
        self.interval = interval
        self.frequency = frequency

    def forward(self, x):
        return self.net(x)

    def loss(self, batch):
        x, y = batch
        return nn.functional.cross_entropy(self(x), y)

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def test_step(self, batch, batch_idx):
        self.log("test_loss", self.loss(batch))

    def predict_step(self, batch, batch_idx):
        return self(batch[0]).argmax(1)

    def configure_optimizers(self):
        optimizer = self.make_optimizer(self.parameters())
        if self.make_scheduler is None:
            return optimizer

        schedule = self.make_scheduler(optimizer)
        return [optimizer], [
            {"scheduler": schedule, "interval": self.interval, "frequency": self.frequency}
        ]


DOUBLE = {"precision": "64-true"}  # so that nothing but the option can differ


def make_small_kind(module=Small, *callbacks, **trainer):
    """3 and 4 batches: a window or a schedule that counts the cohort ends elsewhere."""
    options = {**DOUBLE, **trainer}
    return Kind(
        module,
        make_images,
        lambda: [make() for make in callbacks],
        options,
        tolerance=1e-12,
        clients=(2, 3),
    )
