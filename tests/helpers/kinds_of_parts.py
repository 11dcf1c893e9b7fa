"""Data sets, callbacks, schedules and federations on which training depends."""

import tempfile
from collections.abc import Callable
from functools import partial
from typing import Any

import lightning as L
import numpy as np
import torch
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    EarlyStopping,
    LearningRateMonitor,
    StochasticWeightAveraging,
)
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.optim import lr_scheduler
from torch.utils.data import Dataset

from flsv.aggregation import FedAdam, FedNova
from flsv.filters import OutlierFilter
from flsv.sampling import BernoulliSampler, UniformSampler
from flsv.training.algorithms import SCAFFOLD
from flsv.training.algorithms.feddyn import FedDyn, FedDynServer
from helpers.data import FEATURES, toy_sets
from helpers.hidden_state import RATE, Base, Counting, Kind, make_data
from helpers.kinds_of_modules import (
    ANOTHER_MODEL,
    LogsLoss,
    OptimizedBy,
    persisting,
)


class Samples(Dataset):
    def __init__(self) -> None:
        x, y = toy_sets()[0].tensors
        self.x = x.clone()
        self.y = y
        data = make_data()
        data.setup("fit")
        self.validation_indices = data.server_val_indices.tolist()

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index].clone(), self.y[index]


class NoisySamples(Samples):
    """Validation samples have no noise."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = np.random.RandomState(0)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x, y = super().__getitem__(index)
        if index in self.validation_indices:
            return x, y
        numbers = self.generator.randn(FEATURES)
        noise = torch.from_numpy(numbers).float()
        return x + 0.1 * noise, y


class SamplesThatGrow(Samples):
    num_reads = 0

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x, y = super().__getitem__(index)
        self.num_reads += 1
        factor = 0.2 + self.num_reads / 400
        return x * min(1.0, factor), y


class SamplesWithKeptNoise(Samples):
    """The noise of a sample is drawn when it is read for the first time."""

    def __init__(self) -> None:
        super().__init__()
        self.noise: dict[int, Tensor] = {}

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x, y = super().__getitem__(index)
        if index in self.validation_indices:
            return x, y
        if index not in self.noise:
            self.noise[index] = 0.1 * torch.randn(FEATURES)
        return x + self.noise[index], y


class ReadsLoggedLoss(L.Callback):
    """Weighs the loss by a logged value, in one of the hooks."""

    def __init__(self, name: str, hook: str) -> None:
        self.name = name
        setattr(self, hook, self.weigh)

    def weigh(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        logged_value = trainer.callback_metrics.get(self.name, 1.0)
        pl_module.weight = 0.3 + float(logged_value)


class LogsByItself(L.Callback):
    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        norm = 0.0
        for parameter in pl_module.parameters():
            norm += float(parameter.detach().norm())

        pl_module.log("norm", norm)
        values = {"norm_too": norm}
        for logger in trainer.loggers:
            logger.log_metrics(values, step=trainer.current_epoch)


class KeepsTheTrainer(L.Callback):
    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self.parts_of_run = (trainer, pl_module)

    def on_train_batch_start(self, *_: Any) -> None:
        trainer, module = self.parts_of_run
        module.weight = 1 / (1 + 0.02 * trainer.global_step)


class WrapsTheOptimizersStep(L.Callback):
    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        self.make_step: Callable[..., Any] = trainer.optimizers[0].step
        self.num_steps = 0
        trainer.optimizers[0].step = self.step

    def step(self, *arguments: Any, **options: Any) -> Any:
        self.num_steps += 1
        return self.make_step(*arguments, **options)


class StepsInTheData(Counting):
    """The data module counts."""

    def next(self) -> float:
        data: Any = self.trainer.datamodule  # type: ignore[attr-defined]
        data.num_steps = getattr(data, "num_steps", 0) + 1
        return data.num_steps


class WithBackbone(Base):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = self.net[0]

    def configure_optimizers(self) -> Any:
        trained_parameters = []
        for parameter in self.parameters():
            if parameter.requires_grad:
                trained_parameters.append(parameter)

        return torch.optim.SGD(trained_parameters, RATE)


def make_backbone_finetuning() -> L.Callback:
    return BackboneFinetuning(
        unfreeze_backbone_at_epoch=1, backbone_initial_lr=0.05, train_bn=False
    )


class Scheduled(LogsLoss):
    def __init__(self, make_scheduler: Callable[[Any, Any], Any], **config: Any) -> None:
        super().__init__()
        self.make_scheduler = make_scheduler
        self.config = config

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(
            self.parameters(),
            0.3,
            momentum=0.5,
        )
        scheduler = self.make_scheduler(optimizer, self.trainer)
        config = {"scheduler": scheduler, **self.config}
        return {"optimizer": optimizer, "lr_scheduler": config}


def decay(optimizer: Any, trainer: Any) -> Any:
    return lr_scheduler.ExponentialLR(optimizer, 0.9)


def cycle_once(optimizer: Any, trainer: Any) -> Any:
    num_steps = int(trainer.estimated_stepping_batches) + 1
    return lr_scheduler.OneCycleLR(optimizer, 0.3, total_steps=num_steps)


def wait_for_plateau(optimizer: Any, trainer: Any) -> Any:
    return lr_scheduler.ReduceLROnPlateau(
        optimizer,
        factor=0.2,
        patience=0,
        threshold=0.3,
        threshold_mode="abs",
    )


def make_momentum() -> Any:
    make_optimizer = partial(
        torch.optim.SGD,
        lr=0.05,
        momentum=0.9,
    )
    return OptimizedBy(make_optimizer)


class WithoutBatchNorm(Base):
    def __init__(self) -> None:
        super().__init__()
        self.net[1] = nn.Identity()


class DivergesInRound2(Base):
    """At clients with few batches."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        has_few_batches = self.trainer.num_training_batches <= 4
        if self.current_epoch == 1 and has_few_batches:
            return loss * float("nan")
        return loss


def filtered(make_filter: Callable[[], Any]) -> Kind:
    """A federation with one filter."""

    def make_options() -> dict[str, Any]:
        return {"filters": [make_filter()]}

    return Kind(make_momentum, loop=make_options)


def federation(**options: Any) -> Callable[[], dict[str, Any]]:
    """Options of a loop. Classes are called when a loop is made."""

    def make_options() -> dict[str, Any]:
        values = {}
        for name, value in options.items():
            values[name] = value() if callable(value) else value
        return values

    return make_options


def noisy(samples: Callable[[], Dataset]) -> Callable[[], Any]:
    return lambda: (samples(), toy_sets()[1])


def with_csv(**options: Any) -> dict[str, Any]:
    logger = CSVLogger(tempfile.mkdtemp())
    return {"logger": logger, **options}


DECAY_BY_STEP = partial(
    Scheduled,
    decay,
    interval="step",
)
CYCLE_BY_STEP = partial(
    Scheduled,
    cycle_once,
    interval="step",
)
DATA = {
    "samples with a generator": Kind(sets=noisy(NoisySamples)),
    "samples that count": Kind(
        sets=noisy(SamplesThatGrow),
        outcome="doubt",
        message=ANOTHER_MODEL,
    ),
    "samples with kept noise": Kind(sets=noisy(SamplesWithKeptNoise)),
}
CALLBACKS = {
    "a callback that keeps the Trainer": Kind(callback=KeepsTheTrainer),
    "a callback that wraps a step": Kind(callback=WrapsTheOptimizersStep),
    "an attribute of the data module": Kind(StepsInTheData),
    "a callback that weighs after validation": Kind(
        callback=partial(ReadsLoggedLoss, "val_loss", "on_validation_end")
    ),
    "a callback that logs": Kind(callback=LogsByItself, trainer=with_csv()),
    "LearningRateMonitor": Kind(
        callback=partial(LearningRateMonitor, "step"),
        trainer=with_csv(),
    ),
    "EarlyStopping": Kind(
        callback=partial(EarlyStopping, "val_loss", min_delta=0.5, patience=0),
        rounds=6,
        alone=Kind(rounds=2),
    ),
    "StochasticWeightAveraging": Kind(
        callback=partial(StochasticWeightAveraging, 0.02),
        outcome="refused",
        message="StochasticWeightAveraging ends with an epoch",
    ),
    "BackboneFinetuning": Kind(
        WithBackbone,
        callback=make_backbone_finetuning,
        rounds=4,
    ),
}
SCHEDULES = {
    "ExponentialLR that persists": Kind(DECAY_BY_STEP, loop=persisting),
    "OneCycleLR with drawn cohorts": Kind(
        CYCLE_BY_STEP,
        loop=federation(sampler=partial(UniformSampler, 2)),
        rounds=4,
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
    "coins": Kind(
        make_momentum,
        loop=federation(sampler=partial(BernoulliSampler, 1.8), optimizer_state="persist"),
        rounds=6,
    ),
    "FedAdam": Kind(
        make_momentum,
        loop=federation(aggregator=partial(FedAdam, lr=0.05)),
    ),
    "FedNova": Kind(
        make_momentum,
        loop=federation(aggregator=FedNova, local_epochs=2),
    ),
    "SCAFFOLD": Kind(
        WithoutBatchNorm,
        loop=federation(client_algorithm=SCAFFOLD),
    ),
    "FedDyn": Kind(
        WithoutBatchNorm,
        loop=federation(client_algorithm=partial(FedDyn, 0.1), aggregator=FedDynServer),
    ),
    "OutlierFilter": filtered(OutlierFilter),
    "clients that fail": Kind(DivergesInRound2, loop=persisting, rounds=4),
    "a head that stays": Kind(
        loop=federation(share=["!net.3*"]),
        outcome="refused",
        message="Let clients judge",
    ),
}
KINDS = {**DATA, **CALLBACKS, **SCHEDULES, **FEDERATIONS}
