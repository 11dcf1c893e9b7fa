"""What a federated round costs over plain PyTorch.

    python tools/bench_round.py [--network lenet] [--rounds 5] [--repeats 5]

10 clients x 600 Fashion-MNIST images, batch 32, one local epoch, SGD 0.01, LeNet5 (conv5-10, pool, conv5-20, pool,
fc50, fc10) or an MLP (784-200-200-10), one torch thread: a plain PyTorch loop on preloaded tensors, Lightning's own
Trainer on as many batches of one model, and ``FederatedLoop``: of a user's plain module, of ``ClassifierClient``, with
class-specific Shapley values, TensorBoard and ``contributions.csv``, turn by turn in one process. Prints medians over
the rounds and the ratio, and what the metric and its picture take, of which TensorBoard has ten in a run, however long.
Reads ``$FLSV_DATA_ROOT``; without it, random images of the same size.
"""

from __future__ import annotations

import argparse
import copy
import logging
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from typing import Any

import lightning as L
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.tensorboard._utils import figure_to_image

from flsv import ClassifierClient, FederatedDataModule, FederatedLoop, Reporting
from flsv.data import IIDPartitioner, Splits
from flsv.metrics import ClassSpecificShapley
from flsv.models import MLP, LeNet5

CLIENTS, IMAGES, BATCH = 10, 600, 32
Network = Callable[[], nn.Module]


def images() -> tuple[torch.Tensor, torch.Tensor]:
    """``[6000, 1, 28, 28]`` and labels."""
    total = CLIENTS * IMAGES
    root = os.environ.get("FLSV_DATA_ROOT")
    if root is None:
        return torch.randn(total, 1, 28, 28), torch.randint(10, (total,))
    from torchvision.datasets import FashionMNIST

    data = FashionMNIST(root)
    return data.data[:total, None].float() / 255, data.targets[:total]


def lenet() -> nn.Module:
    torch.manual_seed(0)
    return LeNet5(num_classes=10, input_shape=(1, 28, 28), channels=(10, 20), hidden=(50,))


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return MLP(num_classes=10, input_shape=(1, 28, 28), hidden=(200, 200))


def client(network: Network) -> L.LightningModule:
    return ClassifierClient(network(), num_classes=10, input_shape=(1, 28, 28))


class Own(L.LightningModule):
    """A user's plain module."""

    def __init__(self, network: Network) -> None:
        super().__init__()
        self.network = network()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        return nn.functional.cross_entropy(self.network(x), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class TimedLoop(FederatedLoop):
    """Takes the seconds from one round's end to the next's. Not a callback of its own, which would cost 1 % itself."""

    def on_train_start(self, *hook: Any) -> None:
        super().on_train_start(*hook)
        self.seconds: list[float] = []
        self.start = time.perf_counter()

    def on_train_epoch_end(self, *hook: Any) -> None:
        super().on_train_epoch_end(*hook)
        now = time.perf_counter()
        self.seconds.append(now - self.start)
        self.start = now


def plain(x: torch.Tensor, y: torch.Tensor, rounds: int, network: Network = lenet) -> list[float]:
    """Federated averaging and nothing else."""
    server, seconds = network().to(x.device), []
    clients = torch.randperm(len(x)).view(CLIENTS, IMAGES)
    for _ in range(rounds):
        start = time.perf_counter()
        total: dict[str, torch.Tensor] = {}
        for own in clients:
            model = copy.deepcopy(server)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
            for rows in own[torch.randperm(IMAGES)].to(x.device).split(BATCH):
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
                optimizer.step()
            for name, value in model.state_dict().items():
                total[name] = total.get(name, 0) + value / CLIENTS
        server.load_state_dict(total)
        if x.is_cuda:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return seconds


class TimedEpochs(L.Callback):
    """Takes the seconds of every epoch."""

    def on_train_start(self, *hook: Any) -> None:
        self.seconds: list[float] = []
        self.start = time.perf_counter()

    def on_train_epoch_end(self, *hook: Any) -> None:
        now = time.perf_counter()
        self.seconds.append(now - self.start)
        self.start = now


def trainer_alone(x: torch.Tensor, y: torch.Tensor, rounds: int, network: Network = lenet) -> list[float]:
    """Lightning's Trainer on batches of the same sizes, as one model's epochs: nothing federated."""
    timed, parts = TimedEpochs(), torch.randperm(len(x)).view(CLIENTS, IMAGES)
    batches = [(x[rows], y[rows]) for own in parts for rows in own.split(BATCH)]
    trainer = L.Trainer(
        max_epochs=rounds,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[timed],
    )
    trainer.fit(client(network), DataLoader(batches, batch_size=None))
    return timed.seconds


def federated(
    x: torch.Tensor,
    y: torch.Tensor,
    rounds: int,
    measured: bool,
    comfort: bool = False,
    accelerator: str = "cpu",
    module: L.LightningModule | None = None,
    **options: Any,
) -> list[float]:
    """Through the Trainer: ``measured`` with CSSV, TensorBoard and the CSV, ``comfort`` with a bar and checkpoints;
    ``module`` is LeNet5's by default, ``options`` are the data module's."""
    data = FederatedDataModule(
        TensorDataset(x, y), IIDPartitioner(CLIENTS), batch_size=BATCH, splits=Splits(server_val=0), **options
    )
    metrics = {"cssv": ClassSpecificShapley()} if measured else {}
    loop = TimedLoop(metrics=metrics, reporting=Reporting(table=False, figures=0))
    with tempfile.TemporaryDirectory() as folder:
        trainer = L.Trainer(
            max_epochs=rounds,
            accelerator=accelerator,
            devices=1,
            logger=TensorBoardLogger(folder) if measured else False,
            enable_checkpointing=comfort,
            enable_progress_bar=comfort,
            enable_model_summary=False,
            default_root_dir=folder,
            callbacks=[loop],
        )
        trainer.fit(module or client(lenet), data)
    return loop.seconds


def cssv_seconds() -> tuple[float, float]:
    """Median times of one round's update and value of the metric, and of its picture."""
    metric, values, pictures = ClassSpecificShapley(CLIENTS, 10), [], []
    heads, ids = torch.randn(CLIENTS, 10, 51), torch.arange(CLIENTS)
    for repeat in range(200):
        start = time.perf_counter()
        metric.update(ids, heads, heads.mean(0))
        metric.compute()
        values.append(time.perf_counter() - start)
        if repeat % 20 == 0:
            start = time.perf_counter()
            figure_to_image(metric.plot()[0])
            pictures.append(time.perf_counter() - start)
    return statistics.median(values), statistics.median(pictures)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--network", choices=["lenet", "mlp"], default="lenet")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=5, help="how often each is run, turn by turn")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("lightning").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    rounds, network = arguments.rounds, {"lenet": lenet, "mlp": mlp}[arguments.network]
    x, y = images()
    names = (
        "plain PyTorch",
        "Lightning's Trainer alone",
        "FederatedLoop, a user's module",
        "FederatedLoop",
        "+ CSSV, TensorBoard, CSV",
        "+ progress bar, checkpoints",
    )
    runs: dict[str, list[float]] = {name: [] for name in names}
    for repeat in range(arguments.repeats + 1):
        seconds = [
            plain(x, y, rounds, network),
            trainer_alone(x, y, rounds, network),
            federated(x, y, rounds, measured=False, module=Own(network)),
            federated(x, y, rounds, measured=False, module=client(network)),
            federated(x, y, rounds, measured=True, module=client(network)),
            federated(x, y, rounds, measured=True, comfort=True, module=client(network)),
        ]
        for name, measured in zip(runs, seconds):
            # The first repeat warms up, and so does a run's first round.
            runs[name] += measured[1:] if repeat else []
    table = Table("", "median s/round", "min", "max", "ratio")
    base = statistics.median(runs["plain PyTorch"])
    for name, measured in runs.items():
        middle = statistics.median(measured)
        row = [f"{v:.4f}" for v in (middle, min(measured), max(measured))]
        table.add_row(name, *row, f"{middle / base:.3f}")
    Console().print(table)
    value, picture = cssv_seconds()
    print(f"CSSV itself: {value / base:.2%} of a plain round; its picture: {picture:.2f} s, ten in a run")


if __name__ == "__main__":
    main()
