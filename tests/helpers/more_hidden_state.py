"""Twelve further kinds of hidden state, as published code has them."""

import collections
import contextlib
import functools
import os
import sqlite3
import tempfile
import threading
from pathlib import Path
from typing import Any, ClassVar

import lightning as L
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from torch import Tensor
from torch.nn.utils import parametrizations
from torch.utils.data import Dataset

from helpers.data import CLASSES, toy_sets
from helpers.hidden_state import KINDS, Base, Counting, Kind, entropy


class SpectralNorm(Base):
    """Its buffers turn with every forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.net[3] = parametrizations.spectral_norm(self.net[3])


class WeightNorm(Base):
    def __init__(self) -> None:
        super().__init__()
        self.net[0] = parametrizations.weight_norm(self.net[0])


class MemoryBank(Base):
    """The mean output of each class so far, in buffers that no checkpoint holds."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("bank", torch.zeros(CLASSES, CLASSES), persistent=False)

    def loss(self, batch: Any) -> Tensor:
        out = self.net(batch[0])
        if self.training:
            with torch.no_grad():
                self.bank[batch[1]] = 0.9 * self.bank[batch[1]] + 0.1 * out  # type: ignore[index]
        return entropy(out + 0.1 * self.bank[batch[1]], batch[1])  # type: ignore[index]


class PastLosses(Base):
    def __init__(self) -> None:
        super().__init__()
        self.past: collections.deque[float] = collections.deque([1.0], maxlen=5)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.past.append(float(loss))
        return loss * sum(self.past) / len(self.past)


class Environment(Counting):
    """An environment variable counts."""

    def next(self) -> float:
        os.environ["FLSV_TEST_CALLS"] = str(int(os.environ.get("FLSV_TEST_CALLS", "0")) + 1)
        return int(os.environ["FLSV_TEST_CALLS"])


class Cached(Counting):
    """A cache that answers differently when it has the answer."""

    def next(self) -> float:
        before = factor.cache_info().hits
        factor(0)
        return before


@functools.cache
def factor(key: int) -> int:
    return key


class TemporaryFolder(Base):
    """Writes in ``setup`` what its steps read and write."""

    def setup(self, stage: str) -> None:
        self.folder = Path(tempfile.mkdtemp())
        (self.folder / "calls.txt").write_text("0")

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        calls = int((self.folder / "calls.txt").read_text()) + 1
        (self.folder / "calls.txt").write_text(str(calls))
        return (1 + 0.02 * calls) * self.loss(batch)


class Threaded(Counting):
    """A thread of each step computes, under a lock of the class."""

    lock: ClassVar[Any] = threading.Lock()
    calls: ClassVar[int] = 0

    def next(self) -> float:
        def count() -> None:
            with self.lock:
                type(self).calls += 1

        thread = threading.Thread(target=count)
        thread.start()
        thread.join()
        return self.calls


class NormOfGradients(Base):
    """Divides gradients by a running norm of them."""

    norm = 1.0

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        now = sum(float(p.grad.square().sum()) for p in self.parameters() if p.grad is not None) ** 0.5
        self.norm = 0.8 * self.norm + 0.2 * now
        for p in self.parameters():
            if p.grad is not None:
                p.grad.div_(self.norm)


class FewerBatches(L.Callback):
    """Stops each epoch after a number of batches that grows."""

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int) -> Any:
        return -1 if batch_idx > trainer.current_epoch else None


class Rows(Dataset):
    """Samples in an SQLite file with one connection."""

    def __init__(self) -> None:
        x, y = toy_sets()[0].tensors
        self.length, self.file = len(x), Path(tempfile.mkdtemp()) / "rows.db"
        self.connection = sqlite3.connect(self.file, check_same_thread=False)
        with contextlib.closing(self.connection.cursor()) as cursor:
            cursor.execute("create table rows (id integer primary key, x text, y integer)")
            told = [(i, ",".join(map(repr, row.tolist())), int(label)) for i, (row, label) in enumerate(zip(x, y))]
            cursor.executemany("insert into rows values (?, ?, ?)", told)
        self.connection.commit()

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        x, y = self.connection.execute("select x, y from rows where id = ?", (int(index),)).fetchone()
        return torch.tensor([*map(float, x.split(","))]), torch.tensor(y)


KINDS |= {
    "spectral norm": Kind(SpectralNorm),
    "weight norm": Kind(WeightNorm),
    "a memory bank": Kind(MemoryBank),
    "past losses": Kind(PastLosses),
    "an environment variable": Kind(Environment),
    "a cache": Kind(Cached),
    "a temporary folder of `setup`": Kind(TemporaryFolder),
    "a thread in each step": Kind(Threaded),
    "a running norm of gradients": Kind(NormOfGradients),
    "`GradientAccumulationScheduler`": Kind(callback=lambda: GradientAccumulationScheduler({0: 1, 1: 2})),
    "a callback that ends epochs": Kind(callback=FewerBatches),
    "rows of SQLite": Kind(sets=lambda: (Rows(), toy_sets()[1])),
}
