"""Modules with a state in attributes, buffers, generators and metrics, by which the next step trains."""

import collections
import random

import numpy as np
import torch
import torchmetrics
from torch import nn

from helpers import make_generator
from helpers.data import CLASSES, FEATURES
from zoo.program import Base, Small, entropy


class CarriesState(Base):
    """Adds what its last batches have left, None at first, as recurrent networks and memory banks do."""

    def __init__(self):
        super().__init__()
        self.state = None
        self.bank = collections.deque([torch.zeros(CLASSES)], maxlen=4)

    def training_step(self, batch, batch_idx):
        x, y = batch
        mean_output = sum(self.bank) / len(self.bank)
        outputs = self.net(x) + 0.1 * mean_output
        if self.state is not None:
            outputs = outputs + 0.2 * self.state

        self.state = outputs.mean(0).detach()
        self.bank.append(self.state)
        return entropy(outputs, y)


class MeanInObject:
    """An object of a user's own class."""

    def __init__(self, value):
        self.value = value


class MakesStateInTraining(Base):
    """Makes a buffer and an object in its first step, and in each step replaces a buffer and lengthens a list within
    dicts, as memory banks and running statistics do."""

    def __init__(self):
        super().__init__()
        self.register_buffer("moving_mean", torch.zeros(FEATURES), persistent=False)
        self.register_buffer("first_samples", None, persistent=False)
        self.history = {"train": {"samples": []}}

    def training_step(self, batch, batch_idx):
        x, y = batch
        if not hasattr(self, "sum_of_means"):
            self.make_state(x)
        num_earlier_steps = len(self.history["train"]["samples"])

        # The loss depends on all of this state, so that a state that is lost or of another client changes the model.
        shift = self.moving_mean + self.sum_of_means.value
        loss = self.loss((x + shift, y))
        self.update_state(x)
        size_of_samples = float(self.first_samples.abs().sum())
        return (1 + 0.01 * num_earlier_steps + 0.01 * size_of_samples) * loss

    def make_state(self, x):
        self.first_samples = x[:1]
        self.sum_of_means = MeanInObject(x.mean(0))

    def update_state(self, x):
        first_sample = x[:1]
        batch_mean = x.mean(0)
        self.moving_mean = 0.9 * self.moving_mean + 0.1 * batch_mean
        self.sum_of_means.value += 0.1 * batch_mean
        self.first_samples = torch.cat([self.first_samples, first_sample])
        self.history["train"]["samples"].append(first_sample)


class DrawsFromFourGenerators(Base):
    """Draws noise from generators of torch, NumPy and Python that it holds, and from the global ones."""

    def __init__(self):
        super().__init__()
        self.generator = make_generator(1)
        self.numpy_generator = np.random.default_rng(1)
        self.python_generator = random.Random(1)
        old_generator = np.random.RandomState(3)
        self.old_generators = {"old": [old_generator]}

    def training_step(self, batch, batch_idx):
        x, y = batch
        (old_generator,) = self.old_generators["old"]
        noise = torch.randn(x.shape, generator=self.generator)
        numbers = [
            self.numpy_generator.random(),
            self.python_generator.random(),
            old_generator.rand(),
            random.random(),
            np.random.rand(),  # noqa: NPY002
        ]
        noisy_batch = (x + 0.1 * noise, y)
        factor = 1 + 0.1 * sum(numbers)
        return self.loss(noisy_batch) * factor


class TrainsByItsMetrics(Base):
    """Weighs its loss by torchmetrics that its steps update, as curricula by the running accuracy do."""

    def __init__(self):
        super().__init__()
        self.accuracy = torchmetrics.Accuracy("multiclass", num_classes=CLASSES)
        self.mean_loss = torchmetrics.MeanMetric()

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = self.loss(batch)

        self.accuracy.update(self.net(x), y)
        self.mean_loss.update(loss.detach())
        self.log("accuracy", self.accuracy)

        factor_by_accuracy = 1.5 - self.accuracy.compute()
        factor_by_loss = 0.5 + self.mean_loss.compute()
        return loss * factor_by_accuracy * factor_by_loss


class HasOddParts(Small):
    """Has an empty parameter, a whole number among the parameters and a layer without a gradient, leaves a batch out,
    and keeps outputs for the end of the epoch, as large research modules do all at once."""

    def __init__(self):
        super().__init__()
        self.nothing = nn.Parameter(torch.empty(0))
        self.idle = nn.Linear(3, 3)
        self.number = nn.Parameter(torch.tensor(3), requires_grad=False)
        self.outputs = []

    def training_step(self, batch, batch_idx):
        if batch_idx == 1:
            return None
        self.outputs.append(self.loss(batch))
        return self.outputs[-1]

    def on_train_epoch_end(self):
        self.log("train_loss_epoch_mean", torch.stack(self.outputs).detach().mean())
        self.outputs.clear()


class HasSparseMatrices(Small):
    """Multiplies by a sparse matrix in an attribute and by one in an unsaved buffer, as graph networks do."""

    def __init__(self):
        super().__init__()
        neighbors = (torch.eye(64) + torch.eye(64).roll(1, 0)).to_sparse()
        self.neighbors = neighbors
        self.register_buffer("halves", 0.5 * torch.eye(64).to_sparse(), persistent=False)

    def forward(self, x):
        signal = x.flatten(1).T
        for matrix in (self.neighbors, self.halves):
            signal = torch.sparse.mm(matrix, signal)
        return self.net(signal.T)
