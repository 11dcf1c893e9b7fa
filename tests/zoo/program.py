"""What a program is, and the plain ones that strange ones are variations of."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from flsv import FederatedLoop
from flsv.data import FederatedDataModule, Loader, SizePartitioner, Splits
from flsv.metrics import ShadowShapley
from flsv.server.round_server import NoModel
from helpers import make_generator
from helpers.coalitions_by_hand import make_shadow_loop
from helpers.data import CLASSES, FEATURES, toy_sets
from helpers.fits import fit, trainer_for
from helpers.models import sgd
from zoo.tasks import Task

SEED = 5
RATE = 0.1
entropy = nn.functional.cross_entropy


class Classifier(Task):
    """Has a network whose outputs are logits."""

    net: nn.Module

    def forward(self, x):
        return self.net(x)

    def loss(self, batch):
        x, y = batch
        return entropy(self(x), y)


# ---- of a toy task, with three clients


def make_mlp(*inner_layers, batch_norm=False):
    norms = [nn.BatchNorm1d(8)] if batch_norm else []
    return nn.Sequential(
        nn.Linear(FEATURES, 8), *norms, *inner_layers, nn.ReLU(), nn.Linear(8, CLASSES)
    )


def make_mlp_with_norm():
    return make_mlp(batch_norm=True)


class Base(Classifier):
    """A plain classifier, but for the weight of its loss, which strange programs set."""

    def __init__(self, make_network=make_mlp_with_norm):
        super().__init__()
        torch.manual_seed(3)
        self.net = make_network()
        self.weight = 1.0

    def training_step(self, batch, batch_idx):
        return self.weight * self.loss(batch)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), RATE)


def make_data(sets=toy_sets, loader=None):
    """Deal samples to three clients, and some of them to the server."""
    return FederatedDataModule(
        sets(),
        SizePartitioner([4, 1, 2]),
        batch_size=8,
        splits=Splits(server_val=0.3),
        loader=loader or Loader(),
    )


def fit_valued(folder, module, rounds=2, *, metric=None, loop=None, **options):
    """Fit three clients, and after them coalitions: each client alone, where no ``metric`` says otherwise."""
    metric = metric or ShadowShapley(coalitions="singles")
    federation = make_shadow_loop(metric, **(loop or {}))
    fit(federation, folder, module, make_data(), rounds, **options)
    return federation


# ---- a project with images, and two clients


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


IMAGE_SIZE = 8


def make_images():
    """Noisy stripes of three widths."""
    generator = make_generator()
    return Sets(make_stripes(44, generator), make_stripes(12, generator))


def make_stripes(num_images, generator):
    """Images ``[num_images, 1, IMAGE_SIZE, IMAGE_SIZE]``, all rows of which are one wave and noise."""
    y = torch.arange(num_images) % 3
    frequencies = y[:, None] + 1.0
    waves = torch.sin(torch.arange(IMAGE_SIZE) * frequencies)
    shape = (num_images, 1, IMAGE_SIZE, IMAGE_SIZE)
    images = waves[:, None, None, :].expand(shape)
    noise = torch.randn(shape, generator=generator)
    return TensorDataset(images + 0.3 * noise, y)


class Small(Classifier):
    """A plain classifier of images with BatchNorm, dropout and whatever optimizer and schedule a test asks for."""

    def __init__(self, scheduler=None, interval="step", frequency=1, optimizer=sgd):
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


# ---- programs


@dataclass(frozen=True)
class Program:
    """What a project is fitted with, in a federation or by hand.

    Attributes:
        module: makes one, always of the same weights.
        samples: makes the project's own data, always the same: a data module, or a pair of sets for three clients.
        callbacks: makes the project's own.
        trainer: arguments of the Trainer.
        logged: what ``validation_step`` logs, to be made small.
        tolerance: to which the global model after the last round is that of the loop by hand.
        clients: how many samples those of a data module have, up to a factor.
        loop: makes arguments of the FederatedLoop.
        rounds: of the federation.
    """

    module: Callable[[], L.LightningModule]
    samples: Callable[[], Any]
    callbacks: Callable[[], Sequence[L.Callback]] = list
    trainer: dict[str, Any] = field(default_factory=dict)
    logged: str = "val_loss"
    tolerance: float = 1e-6
    clients: tuple[int, ...] = (2, 1)
    loop: Callable[[], dict[str, Any]] = dict
    rounds: int = 2

    def data(self):
        """Deal the samples to the clients."""
        samples = self.samples()
        if isinstance(samples, L.LightningDataModule):
            return FederatedDataModule(samples, SizePartitioner(list(self.clients)))
        return make_data(lambda: samples)


def with_three_clients(module=Base, samples=toy_sets, rounds=3, **options):
    return Program(module, samples, rounds=rounds, **options)


def fit_program(program, folder, callbacks=(), **options):
    """Fit by a federation with the program's arguments and with ``options``. Return the federation and the module."""
    loop = FederatedLoop(seed=SEED, **{**program.loop(), **options})
    module = program.module()
    all_callbacks = [*callbacks, *program.callbacks()]
    trainer = trainer_for(loop, folder, program.rounds, callbacks=all_callbacks, **program.trainer)
    with suppress(NoModel):  # the last finite model counts
        trainer.fit(module, program.data())
    return loop, module
