"""Data sets, callbacks, schedules and federations on which training depends."""

from functools import partial

import lightning as L
import numpy as np
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch import nn
from torch.optim import lr_scheduler
from torch.utils.data import Dataset

from flsv.sampling import UniformSampler
from flsv.training.algorithms.feddyn import FedDyn, FedDynServer
from helpers.data import FEATURES, toy_sets
from helpers.hidden_state import Base, Kind, make_data
from helpers.kinds_of_modules import LogsLoss, OptimizedBy
from helpers.loops_by_hand import copy_parameters


class Samples(Dataset):
    def __init__(self):
        x, y = toy_sets()[0].tensors
        self.x = x.clone()
        self.y = y
        data = make_data()
        data.setup("fit")
        self.validation_indices = data.server_val_indices.tolist()

    def __len__(self):
        return len(self.y)

    def __getitem__(self, index):
        return self.x[index].clone(), self.y[index]


class NoisySamples(Samples):
    """Validation samples have no noise."""

    def __init__(self):
        super().__init__()
        self.generator = np.random.RandomState(0)

    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        if index in self.validation_indices:
            return x, y
        numbers = self.generator.randn(FEATURES)
        noise = torch.from_numpy(numbers).float()
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


class PullsToTheRoundsModel(L.Callback):
    def on_train_epoch_start(self, trainer, pl_module):
        self.anchors = copy_parameters(pl_module)

    def on_after_backward(self, trainer, pl_module):
        parameters = pl_module.parameters()
        for parameter, anchor in zip(parameters, self.anchors):
            difference = parameter.detach() - anchor
            parameter.grad.add_(0.5 * difference)

    def on_train_epoch_end(self, trainer, pl_module):
        parameters = pl_module.parameters()
        for parameter, anchor in zip(parameters, self.anchors):
            parameter.data.lerp_(anchor, 0.2)


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


def make_momentum():
    make_optimizer = partial(
        torch.optim.SGD,
        lr=0.05,
        momentum=0.9,
    )
    return OptimizedBy(make_optimizer)


class WithoutBatchNorm(Base):
    def __init__(self):
        super().__init__()
        self.net[1] = nn.Identity()


class DivergesInRound2(Base):
    """At clients with few batches."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        has_few_batches = self.trainer.num_training_batches <= 4
        if self.current_epoch == 1 and has_few_batches:
            return loss * float("nan")
        return loss


def federation(**options):
    """Options of a loop. Classes are called when a loop is made."""

    def make_options():
        values = {}
        for name, value in options.items():
            values[name] = value() if callable(value) else value
        return values

    return make_options


def noisy(samples):
    return lambda: (samples(), toy_sets()[1])


CYCLE_BY_STEP = partial(Scheduled, cycle_once, interval="step")
CALLBACKS = {
    "a callback that scales by its counts": Kind(callback=CountsAndScales, outcome="by company"),
    "a callback that pulls to a model": Kind(callback=PullsToTheRoundsModel),
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
}
SCHEDULES = {
    "OneCycleLR with drawn cohorts": Kind(
        CYCLE_BY_STEP,
        loop=federation(sampler=partial(UniformSampler, 2)),
        rounds=4,
        outcome="by company",
    ),
    "ReduceLROnPlateau by validation": Kind(
        partial(Scheduled, wait_for_plateau, monitor="val_loss"),
        rounds=5,
    ),
}
FEDERATIONS = {
    "two of the clients, persisting": Kind(
        make_momentum,
        loop=federation(sampler=partial(UniformSampler, 2), optimizer_state="persist"),
        rounds=5,
    ),
    "FedDyn": Kind(
        WithoutBatchNorm,
        loop=federation(client_algorithm=partial(FedDyn, 0.1), aggregator=FedDynServer),
    ),
    "clients that fail": Kind(
        DivergesInRound2, loop=federation(optimizer_state="persist"), rounds=4
    ),
}
KINDS = {
    "samples with a generator": Kind(sets=noisy(NoisySamples)),
    **CALLBACKS,
    **SCHEDULES,
    **FEDERATIONS,
}
