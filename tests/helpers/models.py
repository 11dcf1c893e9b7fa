"""Small modules as users write them, the plain one first. Only ``Diverges`` knows flsv."""

import copy
from functools import partial

import lightning as L
import torch
from torch import nn

from flsv.federation import FederatedLoop
from helpers.data import CLASSES, FEATURES


def network(batch_norm=True, dropout=0.0):
    torch.manual_seed(3)
    norm = nn.BatchNorm1d(8) if batch_norm else nn.Identity()
    # A bias before BatchNorm has no gradient but rounding noise, which Adam would blow up to full steps.
    return nn.Sequential(
        nn.Linear(FEATURES, 8, bias=not batch_norm),
        norm,
        nn.ReLU(),
        nn.Dropout(dropout),
        nn.Linear(8, CLASSES),
    )


def make_sgd(lr=0.1, **options):
    return partial(torch.optim.SGD, lr=lr, **options)


sgd = make_sgd(momentum=0.9)


def adam(parameters):
    return torch.optim.Adam(parameters, lr=0.001)


class Plain(L.LightningModule):
    """An ordinary LightningModule."""

    def __init__(self, net=None, optimizer=sgd, scheduler=None, interval="epoch"):
        super().__init__()
        self.net = net or network()
        self.make_optimizer = optimizer
        self.make_scheduler = scheduler
        self.interval = interval

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        return nn.functional.cross_entropy(self(x), y)

    def share_of_hits(self, batch):
        x, y = batch
        is_right = self(x).argmax(-1) == y
        return is_right.float().mean()

    def validation_step(self, batch, batch_idx):
        self.log("val_acc", self.share_of_hits(batch))

    def test_step(self, batch, batch_idx):
        self.log("test_acc", self.share_of_hits(batch))

    def configure_optimizers(self):
        optimizer = self.make_optimizer(self.parameters())
        if self.make_scheduler is None:
            return optimizer
        scheduler = {"scheduler": self.make_scheduler(optimizer), "interval": self.interval}
        return {"optimizer": optimizer, "lr_scheduler": scheduler}


class LogsLoss(Plain):
    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val_loss", nn.functional.cross_entropy(self(x), y))


class OfShape:
    """Shares what has so many dimensions."""

    def __init__(self, dimensions):
        self.dimensions = dimensions

    def __call__(self, name, tensor):
        return tensor.ndim == self.dimensions


class Plainest(Plain):
    """Without BatchNorm."""

    def __init__(self, optimizer=sgd, **kwargs):
        super().__init__(network(batch_norm=False), optimizer, **kwargs)


class LogsByRound(Plain):
    """Logs a value of each round under a name. None: nothing."""

    def __init__(self, name, values):
        super().__init__()
        self.name = name
        self.values = values

    def on_validation_epoch_end(self):
        if self.name is not None:
            self.log(self.name, self.values[self.current_epoch])


class Diverges(Plain):
    """Some clients' gradients are NaN in some rounds: pairs (round, client)."""

    def __init__(self, net, optimizer, failing):
        super().__init__(copy.deepcopy(net), optimizer)
        self.failing = failing

    def training_step(self, batch, batch_idx):
        loop = loop_of(self)
        loss = super().training_step(batch, batch_idx)
        if (loop.round_index, loop.current_client) in self.failing:
            return loss * float("nan")
        return loss


def loop_of(module):
    callbacks = module.trainer.callbacks
    (loop,) = [callback for callback in callbacks if isinstance(callback, FederatedLoop)]
    return loop
