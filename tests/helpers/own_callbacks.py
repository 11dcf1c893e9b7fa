"""Callbacks of users' own, as a configuration names them."""

import copy
from pathlib import Path

import lightning as L
import torch


class WithoutArguments(L.Callback):
    """Does nothing, and has no arguments."""


class WritesBesideItsLog(L.Callback):
    """Writes a file into the folder of its logger after each round."""

    def on_train_epoch_end(self, trainer, pl_module):
        folder = Path(trainer.log_dir, "own")
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{trainer.current_epoch}.txt").write_text("")


class OwnAverage(L.Callback):
    """Averages the weights after each batch, as in a Trainer's own loop, in tensors that ``copies_of`` makes."""

    def __init__(self, copies_of):
        self.copies_of = copies_of
        self.average = None

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if self.average is None:
            self.average = self.copies_of(pl_module)
        averages = self.average
        if isinstance(averages, torch.nn.Module):
            averages = averages.parameters()
        elif isinstance(averages, dict):
            averages = averages.values()
        for average, parameter in zip(averages, pl_module.parameters()):
            average.data.lerp_(parameter.detach(), 0.1)


class RemembersTheStart(L.Callback):
    """Keeps the weights with which each client begins."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if batch_idx == 0:
            self.initial_weights = copy.deepcopy(list(pl_module.parameters()))
