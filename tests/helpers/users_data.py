"""Samples, a module and a fit of a user whose data module is read in a federated fit."""

import lightning as L
import torch
from torch import nn

from flsv import FederatedLoop, Reporting
from helpers import make_generator
from helpers.fits import trainer_for

SEED = 5
FEATURES, CLASSES = 4, 3
BATCH_SIZE = 8


def make_samples(n, seed):
    generator = make_generator(seed)
    y = torch.randint(CLASSES, (n,), generator=generator)
    noise = torch.randn(n, FEATURES, generator=generator)
    return noise + y[:, None], y


class Net(L.LightningModule):
    def __init__(self, inputs=FEATURES):
        super().__init__()
        torch.manual_seed(3)
        self.net = nn.Linear(inputs, CLASSES)

    def training_step(self, batch, batch_idx):
        x, y = batch
        return nn.functional.cross_entropy(self.net(x), y)

    def validation_step(self, batch, batch_idx):
        loss = Net.training_step(self, batch, batch_idx)
        self.log("val_loss", loss)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


def fit(module, data, folder, rounds=2, callbacks=(), **loop_options):
    loop = FederatedLoop(seed=SEED, reporting=Reporting(table=False), **loop_options)
    trainer = trainer_for(loop, folder, rounds, callbacks=callbacks)
    trainer.fit(module, data)
    return loop
