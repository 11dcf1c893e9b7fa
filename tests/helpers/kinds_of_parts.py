"""Data sets, callbacks, schedules and federations on which training depends."""

from functools import partial

import lightning as L
import numpy as np
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch.optim import lr_scheduler
from torch.utils.data import Dataset

from flsv.sampling import UniformSampler
from helpers.data import FEATURES, toy_sets
from helpers.hidden_state import Base, Kind, make_data
from helpers.kinds_of_modules import LogsLoss


class NoisySamples(Dataset):
    """Validation samples have no noise."""

    def __init__(self):
        self.samples = toy_sets()[0]
        self.generator = np.random.RandomState(0)
        data = make_data()
        data.setup("fit")
        self.validation_indices = data.server_val_indices.tolist()

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        x, y = self.samples[index]
        if index in self.validation_indices:
            return x, y
        noise = torch.from_numpy(self.generator.randn(FEATURES)).float()
        return x + 0.1 * noise, y


class CountsAndScales(L.Callback):
    def __init__(self):
        self.num_batches = 0
        self.num_rounds = 0

    def on_train_batch_start(self, trainer, pl_module, *_):
        self.num_batches += 1
        divisor = 1 + 0.02 * self.num_batches
        pl_module.weight = 1 / divisor

    @torch.no_grad()
    def on_train_epoch_end(self, trainer, pl_module):
        self.num_rounds += 1
        for parameter in pl_module.parameters():
            factor = 1 - 0.03 * self.num_rounds
            parameter.mul_(factor)


class WrapsTheOptimizersStep(L.Callback):
    def on_fit_start(self, trainer, pl_module):
        self.make_step = trainer.optimizers[0].step
        self.num_steps = 0
        trainer.optimizers[0].step = self.step

    def step(self, *arguments, **options):
        self.num_steps += 1
        return self.make_step(*arguments, **options)


class SavesAndWeighs(ModelCheckpoint):
    def on_train_epoch_end(self, trainer, pl_module):
        super().on_train_epoch_end(trainer, pl_module)
        pl_module.weight = float(trainer.callback_metrics["val_loss"])


def make_weight_averaging():
    from lightning.pytorch.callbacks.weight_averaging import EMAWeightAveraging

    return EMAWeightAveraging(decay=0.8)


class Scheduled(LogsLoss):
    def __init__(self, make_scheduler, **config):
        super().__init__()
        self.make_scheduler = make_scheduler
        self.config = config

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(
            self.parameters(),
            0.3,
            momentum=0.5,
        )
        scheduler = self.make_scheduler(optimizer, self.trainer)
        config = {"scheduler": scheduler, **self.config}
        return {"optimizer": optimizer, "lr_scheduler": config}


def cycle_once(optimizer, trainer):
    num_steps = int(trainer.estimated_stepping_batches) + 1
    return lr_scheduler.OneCycleLR(optimizer, 0.3, total_steps=num_steps)


def wait_for_plateau(optimizer, trainer):
    return lr_scheduler.ReduceLROnPlateau(
        optimizer,
        factor=0.2,
        patience=0,
        threshold=0.3,
        threshold_mode="abs",
    )


class DivergesInRound2(Base):
    """At clients with few batches."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        has_few_batches = self.trainer.num_training_batches <= 4
        if self.current_epoch == 1 and has_few_batches:
            return loss * float("nan")
        return loss


KINDS = {
    "samples with a generator": Kind(sets=lambda: (NoisySamples(), toy_sets()[1])),
    "a callback that scales by its counts": Kind(callback=CountsAndScales, outcome="by company"),
    "a callback that wraps a step": Kind(callback=WrapsTheOptimizersStep),
    "EMAWeightAveraging": Kind(callback=make_weight_averaging),
    "EarlyStopping": Kind(
        callback=partial(EarlyStopping, "val_loss", min_delta=0.5, patience=0),
        rounds=6,
        alone=Kind(rounds=2),
    ),
    "a subclass of ModelCheckpoint": Kind(
        callback=SavesAndWeighs, trainer={"enable_checkpointing": True}
    ),
    "OneCycleLR with drawn cohorts": Kind(
        partial(Scheduled, cycle_once, interval="step"),
        loop=lambda: {"sampler": UniformSampler(2)},
        rounds=4,
        outcome="by company",
    ),
    "ReduceLROnPlateau by validation": Kind(
        partial(Scheduled, wait_for_plateau, monitor="val_loss"),
        rounds=5,
    ),
    "clients that fail": Kind(
        DivergesInRound2, loop=lambda: {"optimizer_state": "persist"}, rounds=4
    ),
}
