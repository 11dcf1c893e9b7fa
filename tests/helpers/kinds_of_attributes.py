"""LightningModules that keep a state in attributes of every kind, or elsewhere in the process."""

import collections
import random
import tempfile
from pathlib import Path

import numpy as np
import torch

from helpers import make_generator
from helpers.data import CLASSES, FEATURES
from helpers.hidden_state import Base, Counting, Global, Kind, entropy


class CarriesState(Base):
    """A recurrent state, None at first, and the last outputs."""

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
    def __init__(self, value):
        self.value = value


class MakesState(Base):
    """Its first step makes a buffer and an object. Each step replaces a buffer, changes the object, lengthens a buffer
    and appends to a list within dicts."""

    def __init__(self):
        super().__init__()
        self.register_buffer("moving_mean", torch.zeros(FEATURES), persistent=False)
        self.register_buffer("first_samples", None, persistent=False)
        self.history = {"train": {"samples": []}}

    def training_step(self, batch, batch_idx):
        x, y = batch
        batch_mean = x.mean(0)
        first_sample = x[:1]
        if not hasattr(self, "sum_of_means"):
            self.first_samples = first_sample
            self.sum_of_means = MeanInObject(x.mean(0))
        samples = self.history["train"]["samples"]
        num_steps = len(samples)
        shift = self.moving_mean + self.sum_of_means.value
        loss = self.loss((x + shift, y))

        self.moving_mean = 0.9 * self.moving_mean + 0.1 * batch_mean
        self.sum_of_means.value += 0.1 * batch_mean
        self.first_samples = torch.cat([self.first_samples, first_sample])
        samples.append(first_sample)

        # The loss depends on all of this state, so that a state that is lost or of another client changes the model.
        size_of_samples = float(self.first_samples.abs().sum())
        factor = 1 + 0.01 * num_steps + 0.01 * size_of_samples
        return factor * loss


class FourGenerators(Base):
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


# ---- numbers of steps


class Closure(Counting):
    def __init__(self):
        super().__init__()
        calls = 0

        def count_calls():
            nonlocal calls
            calls += 1
            return calls

        self.count_calls = count_calls

    def next(self):
        return self.count_calls()


class Slots:
    __slots__ = ("number",)

    def __init__(self):
        self.number = 0


class SlotsCounter(Counting):
    def __init__(self):
        super().__init__()
        self.slots = Slots()

    def next(self):
        self.slots.number += 1
        return self.slots.number


# ---- elsewhere


class ClassCounter(Counting):
    num_steps = 0

    def next(self):
        ClassCounter.num_steps += 1
        return ClassCounter.num_steps


class TemporaryFolder(Base):
    """Writes in ``setup`` what its steps read and write."""

    def setup(self, stage):
        self.folder = Path(tempfile.mkdtemp())
        (self.folder / "calls.txt").write_text("0")

    def training_step(self, batch, batch_idx):
        calls = int((self.folder / "calls.txt").read_text()) + 1
        (self.folder / "calls.txt").write_text(str(calls))
        return (1 + 0.02 * calls) * self.loss(batch)


class OpenFile(Counting):
    def __init__(self):
        super().__init__()
        path = Path(tempfile.mkdtemp(), "numbers")
        path.write_bytes(bytes(range(256)) * 20)
        self.file = path.open("rb", buffering=0)

    def next(self):
        return self.file.read(1)[0]


KINDS = {
    "a carried state and a deque": Kind(CarriesState),
    "buffers and objects made in training": Kind(MakesState),
    "an object with slots": Kind(SlotsCounter),
    "generators of four kinds": Kind(FourGenerators),
    "a closure": Kind(Closure, outcome="by company", passes="module.count_calls"),
    "a global": Kind(Global, outcome="by company"),
    "a counter of the class": Kind(
        ClassCounter, outcome="by company", passes="ClassCounter.num_steps"
    ),
    "a temporary folder of `setup`": Kind(TemporaryFolder, outcome="by company"),
    "an open file": Kind(OpenFile, outcome="refused", message="the module.file .FileIO. cannot be"),
}
