"""Ordinary kinds of LightningModules, Trainers and callbacks, and beside each the training of a client by hand."""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
from torch import Tensor, nn

from helpers.coalitions_by_hand import (
    RATE,
    AnnealedByHand,
    CoalitionByHand,
    OwnGeneratorByHand,
    PersistedByHand,
    PlateauByHand,
    loss_with_noise,
    make_plateau_scheduler,
)
from helpers.data import CLASSES, FEATURES


def make_mlp(*between: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 8), *between, nn.ReLU(), nn.Linear(8, CLASSES))


class Module(L.LightningModule):
    def __init__(self, net: Callable[[], nn.Module] = make_mlp, optimizer: Any = None) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.net = net()
        self.optimizer = optimizer or partial(torch.optim.SGD, lr=RATE)
        self.beta = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def loss(self, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(self(batch[0]), batch[1])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))

    def configure_optimizers(self) -> Any:
        return self.optimizer(self.parameters())


class Manual(Module):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        optimizer.step()


class OwnGenerator(Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(1)
        self.random = np.random.default_rng(1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return loss_with_noise(self.net, batch, self.generator) * (1 + 0.1 * self.random.random())


class Plateau(Module):
    def configure_optimizers(self) -> Any:
        optimizer = self.optimizer(self.parameters())
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": make_plateau_scheduler(optimizer), "monitor": "val_loss"},
        }


class DigitsPlateau(Plateau):
    """As a configuration names it."""

    def __init__(self) -> None:
        super().__init__(lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 10)))


class DigitsOneCycle(DigitsPlateau):
    """Its learning rates depend on the number of rounds that are planned."""

    def configure_optimizers(self) -> Any:
        optimizer = self.optimizer(self.parameters())
        planned_rounds = self.trainer.max_epochs or 1
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4 * RATE, planned_rounds + 1)
        return {"optimizer": optimizer, "lr_scheduler": scheduler}


class DigitsFromFile(DigitsPlateau):
    """Its loss has a factor that is in a file."""

    def __init__(self, factor: str) -> None:
        super().__init__()
        self.beta = float(Path(factor).read_text())


class DigitsCountsSteps(DigitsPlateau):
    """Counts its steps in the class, beside the module's state, and its loss grows with them.

    So a training equals another one only if both begin in a process that has trained nothing. The variable WAITS of the
    environment has the seconds that each step takes longer.
    """

    num_steps = 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        time.sleep(float(os.environ.get("WAITS", 0)))
        DigitsCountsSteps.num_steps += 1
        loss = super().training_step(batch, batch_idx)
        return loss * (1 + DigitsCountsSteps.num_steps / 100)


class Anneals(L.Callback):
    """From the second round on."""

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, *_: Any) -> None:
        pl_module.beta *= 0.95 if trainer.current_epoch else 1.0


class Annealed(Module):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch) * self.beta


@dataclass
class Kind:
    """A module, how its clients train by hand, and what else its loop has."""

    module: Callable[[], Module] = Module
    hand: type[CoalitionByHand] = CoalitionByHand
    callback: Callable[[], L.Callback] | None = None
    loop: dict[str, Any] = field(default_factory=dict)


MOMENTUM = partial(torch.optim.SGD, lr=RATE, momentum=0.9)
KINDS: dict[str, Kind] = {
    "a plain MLP": Kind(),
    "dropout": Kind(partial(Module, partial(make_mlp, nn.Dropout(0.3)))),
    "BatchNorm": Kind(partial(Module, lambda: make_mlp(nn.BatchNorm1d(8)))),
    "manual optimization": Kind(Manual),
    "generators of torch and NumPy on the module": Kind(OwnGenerator, OwnGeneratorByHand),
    '`optimizer_state="persist"`': Kind(
        partial(Module, optimizer=MOMENTUM), PersistedByHand, loop={"optimizer_state": "persist"}
    ),
    "`ReduceLROnPlateau`": Kind(Plateau, PlateauByHand),
    "a callback that anneals an attribute": Kind(Annealed, AnnealedByHand, Anneals),
}


class DigitsInFile(Manual):
    """Its loss falls from round to round, which it counts by the lines of a file that it writes."""

    def __init__(self) -> None:
        Module.__init__(self, lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 10)))
        self.automatic_optimization = False

    def on_train_epoch_start(self) -> None:
        path = Path("rounds.txt")
        num_earlier_rounds = 0
        if path.exists():
            num_earlier_rounds = len(path.read_text().splitlines())

        with path.open("a") as file:
            file.write("one more\n")
        self.beta = 0.7**num_earlier_rounds

    def loss(self, batch: Any) -> Tensor:
        return self.beta * super().loss(batch)
