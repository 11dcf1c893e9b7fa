"""Modules that a configuration file names, as ``zoo.configured.DigitsPlateau``."""

import os
import time

from torch import nn
from torch.optim.lr_scheduler import OneCycleLR

from zoo.optimizers import LowersRateOnPlateau
from zoo.program import RATE, Base


class OfOtherPackage(nn.Linear):
    """A module of the package pytorch_lightning, whose classes are not those of lightning.pytorch."""

    __module__ = "pytorch_lightning.core.module"


class DigitsPlateau(LowersRateOnPlateau):
    """Lowers its rate when the validation loss stops falling."""

    def __init__(self):
        super().__init__(self.make_network)

    @staticmethod
    def make_network():
        layer = nn.Linear(64, 10)
        return nn.Sequential(nn.Flatten(), layer)


class DigitsOneCycle(DigitsPlateau):
    """Has learning rates that depend on the number of rounds that are planned."""

    def configure_optimizers(self):
        optimizer = Base.configure_optimizers(self)
        planned_rounds = self.trainer.max_epochs or 1
        scheduler = OneCycleLR(optimizer, 4 * RATE, total_steps=planned_rounds + 1)
        return {"optimizer": optimizer, "lr_scheduler": scheduler}


class DigitsThatWait(DigitsPlateau):
    """Takes longer for each step, by the seconds in the variable WAITS of the environment."""

    def training_step(self, batch, batch_idx):
        time.sleep(float(os.environ.get("WAITS", 0)))
        return super().training_step(batch, batch_idx)


class DigitsCountsSteps(DigitsPlateau):
    """Counts its steps in the class, and its loss grows with them.

    So a training equals another one only if both begin in a process that has trained nothing.
    """

    num_steps = 0

    def training_step(self, batch, batch_idx):
        DigitsCountsSteps.num_steps += 1
        loss = super().training_step(batch, batch_idx)
        return loss * (1 + DigitsCountsSteps.num_steps / 100)
