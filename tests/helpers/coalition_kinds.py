"""Small classifiers, and those that configurations name."""

import os
import time
from collections.abc import Callable

import torch
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR, ReduceLROnPlateau

from helpers.data import CLASSES, FEATURES
from helpers.hidden_state import RATE, Base


def make_mlp(*between: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 8), *between, nn.ReLU(), nn.Linear(8, CLASSES))


class Module(Base):
    def __init__(
        self,
        net: Callable[[], nn.Module] = make_mlp,
    ):
        super().__init__()
        torch.manual_seed(3)
        self.net = net()


class Manual(Module):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        optimizer.step()


def make_plateau_scheduler(optimizer) -> ReduceLROnPlateau:
    return ReduceLROnPlateau(
        optimizer,
        factor=0.1,
        patience=0,
        threshold=0.4,
        threshold_mode="abs",
    )


class Plateau(Module):
    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": make_plateau_scheduler(optimizer), "monitor": "val_loss"},
        }


class DigitsPlateau(Plateau):
    """As a configuration names it."""

    def __init__(self):
        super().__init__(self.make_network)

    @staticmethod
    def make_network():
        layer = nn.Linear(64, 10)
        return nn.Sequential(nn.Flatten(), layer)


class DigitsOneCycle(DigitsPlateau):
    """Its learning rates depend on the number of rounds that are planned."""

    def configure_optimizers(self):
        optimizer = Base.configure_optimizers(self)
        planned_rounds = self.trainer.max_epochs or 1
        scheduler = OneCycleLR(optimizer, 4 * RATE, total_steps=planned_rounds + 1)
        return {"optimizer": optimizer, "lr_scheduler": scheduler}


class DigitsThatWait(DigitsPlateau):
    """The variable WAITS of the environment has the seconds that each step takes longer."""

    def training_step(self, batch, batch_idx):
        time.sleep(float(os.environ.get("WAITS", 0)))
        return super().training_step(batch, batch_idx)


class DigitsCountsSteps(DigitsPlateau):
    """Counts its steps in the class, beside the module's state, and its loss grows with them.

    So a training equals another one only if both begin in a process that has trained nothing.
    """

    num_steps = 0

    def training_step(self, batch, batch_idx):
        DigitsCountsSteps.num_steps += 1
        loss = super().training_step(batch, batch_idx)
        return loss * (1 + DigitsCountsSteps.num_steps / 100)
