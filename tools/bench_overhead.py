"""What a batch costs beyond its own step: the hooks of Lightning and of the loop.

    python tools/bench_overhead.py [--repeats 5]

10 clients x 320 samples, batch 8, a linear layer: a step so small that the rest shows. Processor time, so that a busy
machine disturbs less; the least over the rounds. A plain PyTorch loop, ``FederatedLoop`` with ``ClassifierClient`` and
with a LightningModule of a user's, turn by turn in one process.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import lightning as L
import torch
from common import Timed, be_quiet, round_times
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from flsv import ClassifierClient, FederatedDataModule, Reporting
from flsv.data import IIDPartitioner, Splits

SAMPLES, BATCH, CLIENTS, ROUNDS = 3200, 8, 10, 3


class Own(L.LightningModule):
    """A user's module."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(20, 5)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return nn.functional.cross_entropy(self.layer(x), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def plain(x: Tensor, y: Tensor) -> list[float]:
    model, seconds = nn.Linear(20, 5), []
    for _ in range(ROUNDS):
        start = time.process_time()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for rows in torch.randperm(SAMPLES).split(BATCH):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
            optimizer.step()
        seconds.append(time.process_time() - start)
    return seconds


def federated(x: Tensor, y: Tensor, make: Callable[[], L.LightningModule]) -> list[float]:
    data = FederatedDataModule(
        TensorDataset(x, y), IIDPartitioner(CLIENTS), batch_size=BATCH, splits=Splits(server_val=0)
    )
    return round_times(Timed(reporting=Reporting(table=False, figures=0)), make(), data, ROUNDS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    repeats = parser.parse_args().repeats
    be_quiet()
    x, y = torch.randn(SAMPLES, 20), torch.randint(5, (SAMPLES,))
    ours = lambda: ClassifierClient(nn.Linear(20, 5), num_classes=5, input_shape=(20,))  # noqa: E731
    ways: dict[str, Callable[[], list[float]]] = {
        "plain PyTorch": lambda: plain(x, y),
        "ClassifierClient": lambda: federated(x, y, ours),
        "a user's module": lambda: federated(x, y, Own),
    }
    found: dict[str, list[float]] = {}
    for _ in range(repeats):
        for name, way in ways.items():
            found.setdefault(name, []).extend(way())
    base = min(found["plain PyTorch"])
    print("| | us per batch | beyond the plain loop |\n|---|---|---|")
    for name, seconds in found.items():
        batches = SAMPLES // BATCH
        print(f"| {name} | {min(seconds) / batches * 1e6:.0f} | {(min(seconds) - base) / batches * 1e6:.0f} |")


if __name__ == "__main__":
    main()
