"""Modules whose optimizers and schedules are strange: they count elsewhere, are stepped by hand, or follow a value."""

import torch
from timm.utils import AverageMeter
from torch.optim import lr_scheduler

from zoo.logged import LogsLoss
from zoo.program import RATE, Base, make_mlp


class CountsInMeter(torch.optim.SGD):
    """Counts its steps in an object of a library, beside its state_dict."""

    def __init__(self, parameters):
        super().__init__(parameters, RATE)
        self.meter = AverageMeter()

    def step(self, closure=None):
        self.meter.update(1.0)
        return super().step(closure)


class HasCountingOptimizer(Base):
    """Trains with an optimizer that counts beside its state_dict, as optimizers of research code do."""

    def configure_optimizers(self):
        return CountsInMeter(self.parameters())


class StepsByHand(Base):
    """Takes a step after every ``window`` batches itself, as in Lightning's guide to manual optimization."""

    def __init__(self, make_network=make_mlp, window=1):
        super().__init__(make_network)
        self.automatic_optimization = False
        self.window = window

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        loss = self.loss(batch) / self.window
        self.manual_backward(loss)
        if (batch_idx + 1) % self.window == 0:
            optimizer.step()
            optimizer.zero_grad()


class Scheduled(LogsLoss):
    """Trains with a schedule of which Lightning is told when to step it, and by which value."""

    def __init__(self, make_scheduler, **config):
        super().__init__()
        self.make_scheduler = make_scheduler
        self.config = config

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), 0.3, momentum=0.5)
        scheduler = self.make_scheduler(optimizer, self.trainer)
        config = {"scheduler": scheduler, **self.config}
        return {"optimizer": optimizer, "lr_scheduler": config}


def cycle_once(optimizer, trainer):
    num_steps = int(trainer.estimated_stepping_batches) + 1
    return lr_scheduler.OneCycleLR(optimizer, 0.3, total_steps=num_steps)


def wait_for_plateau(optimizer, trainer=None, factor=0.2, threshold=0.3):
    return lr_scheduler.ReduceLROnPlateau(
        optimizer, factor=factor, patience=0, threshold=threshold, threshold_mode="abs"
    )


class LowersRateOnPlateau(Base):
    """Lowers its rate when the validation loss stops falling, as many recipes do."""

    def __init__(self, make_network=make_mlp):
        super().__init__(make_network)

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        scheduler = wait_for_plateau(optimizer, factor=0.1, threshold=0.4)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss"},
        }
