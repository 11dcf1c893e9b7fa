"""A metric changes nothing of a run whose hooks read all loaders, data sets and generators that they can reach."""

import inspect
import random

import lightning as L
import pytest
import torch
from torch.utils.data import DataLoader, Dataset
from torchmetrics.classification import MulticlassAccuracy

from flsv import FederatedDataModule, metrics
from flsv.data import SizePartitioner
from helpers import make_generator
from helpers.fits import state_vector
from helpers.users_data import BATCH_SIZE, CLASSES, Net, fit, make_samples


class AddsOwnNoise(Dataset):
    """Adds noise of a generator of its own."""

    def __init__(self, count, seed):
        self.x, self.y = make_samples(count, seed)
        self.random = random.Random(seed)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return self.x[index] + self.random.random(), self.y[index]


class DrawsOrdersFromOneGenerator(L.LightningDataModule):
    """Its loaders draw their orders from one generator."""

    def setup(self, stage):
        self.generator = make_generator(7)
        self.train = AddsOwnNoise(48, seed=0)
        self.val = AddsOwnNoise(16, seed=1)

    def train_dataloader(self):
        return DataLoader(self.train, BATCH_SIZE, shuffle=True, generator=self.generator)

    def val_dataloader(self):
        return DataLoader(self.val, BATCH_SIZE, shuffle=True, generator=self.generator)


def numbers_in_reach(trainer):
    """Return the numbers that a hook reads of loaders, data sets, generators and the Trainer."""
    data = trainer.datamodule
    numbers = [
        torch.rand(()).item(),
        torch.rand((), generator=data.generator).item(),
        random.random(),
        trainer.global_step,
        trainer.estimated_stepping_batches,
    ]
    loaders = [
        trainer.train_dataloader,
        data.train_dataloader(),
        data.val_dataloader(),
    ]
    if trainer.val_dataloaders is not None:  # Lightning makes it before the first validation
        loaders.append(trainer.val_dataloaders)
    for loader in loaders:
        x, _ = next(iter(loader))
        first_x, _ = loader.dataset[0]
        numbers += [x.mean().item(), first_x.mean().item(), len(loader)]
    return numbers


HOOKS = (
    "on_train_start",
    "on_train_epoch_start",
    "on_train_batch_start",
    "on_validation_start",
    "on_validation_epoch_start",
    "on_validation_batch_start",
    "on_validation_batch_end",
    "on_validation_epoch_end",
    "on_train_epoch_end",
)


class ScalesLossByNumbersRead(Net):
    """Scales its loss by the numbers that its last hook has read."""

    def __init__(self):
        super().__init__()
        self.scale = 1.0

    def training_step(self, batch, batch_idx):
        return self.scale * super().training_step(batch, batch_idx)

    def forward(self, x):
        return self.net(x)


def make_hook(name):
    def hook(self, *arguments):
        numbers = numbers_in_reach(self.trainer)
        self.scale = 1 + sum(numbers) % 1

    hook.__signature__ = inspect.signature(getattr(L.LightningModule, name))
    return hook


for _name in HOOKS:
    setattr(ScalesLossByNumbersRead, _name, make_hook(_name))


def weights_with(folder, metric=None):
    module = ScalesLossByNumbersRead()
    data = FederatedDataModule(DrawsOrdersFromOneGenerator(), SizePartitioner([3, 2, 1]))
    named_metrics = {} if metric is None else {"metric": metric}
    fit(module, data, folder, metrics=named_metrics)
    return state_vector(module)


ACCURACY = MulticlassAccuracy(CLASSES)
METRICS = [
    metrics.CumulativeShapley(performance="val_loss", mode="min"),
    metrics.CumulativeShapley(performance="accuracy"),
    metrics.CumulativeShapley(performance=ACCURACY),
    metrics.GradientShapley(loss="val_loss"),
    metrics.GradientShapley(),
    metrics.ClassSpecificShapley(),
    metrics.ShadowShapley(performance="val_loss", mode="min", coalitions="singles"),
    metrics.ShadowShapley(coalitions="singles"),
    metrics.WassersteinContribution(),
    metrics.CalibratedOTGradient(),
]


@pytest.fixture(scope="module")
def weights_without_metrics(tmp_path_factory):
    return weights_with(tmp_path_factory.mktemp("without"))


@pytest.mark.by_turn
@pytest.mark.fast_rows
@pytest.mark.parametrize("metric", METRICS, ids=repr)
def test_run_trains_as_without_the_metric(tmp_path, weights_without_metrics, metric):
    assert torch.equal(weights_with(tmp_path, metric), weights_without_metrics)
