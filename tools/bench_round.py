"""What a federated round costs over plain PyTorch, and what in-run data Shapley adds to it.

    python tools/bench_round.py [--network lenet] [--rounds 5] [--repeats 5]
    python tools/bench_round.py --in-run

10 clients x 600 Fashion-MNIST images, batch 32, one local epoch, SGD 0.01, LeNet5 (conv5-10, pool, conv5-20, pool,
fc50, fc10) or an MLP (784-200-200-10), one torch thread: a plain PyTorch loop on preloaded tensors, Lightning's own
Trainer on as many batches of one model, and ``FederatedLoop``: of a user's plain module, of ``ClassifierClient``, with
class-specific Shapley values, TensorBoard and ``contributions.csv``, turn by turn in one process. ``--in-run``: the
same federation with ``InRunValues`` and 400 validation images, by ``every``, in ratios to the one without. Reads
``$FLSV_DATA_ROOT``; without it, random images of the same size.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Callable
from functools import partial
from typing import Any

import lightning as L
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from studies.common import RoundTimer, be_quiet, in_turns, plain_rounds, quiet_trainer, ratios
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from flsv import ClassifierClient, FederatedDataModule, FederatedLoop, Reporting
from flsv.data import IIDPartitioner, Splits
from flsv.metrics import ClassSpecificShapley, InRunShapley
from flsv.models import MLP, LeNet5
from flsv.training.algorithms import InRunValues

CLIENTS, IMAGES, BATCH = 10, 600, 32
Network = Callable[[], nn.Module]


def images(total: int = CLIENTS * IMAGES) -> tuple[torch.Tensor, torch.Tensor]:
    """``[total, 1, 28, 28]`` and labels."""
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


def plain(x: torch.Tensor, y: torch.Tensor, rounds: int, network: Network = lenet) -> list[float]:
    """Federated averaging and nothing else."""
    clients = list(torch.randperm(len(x)).view(CLIENTS, IMAGES))
    return [wall for wall, _ in plain_rounds(network().to(x.device), x, y, clients, rounds, 0.01, BATCH)]


def trainer_alone(x: torch.Tensor, y: torch.Tensor, rounds: int, network: Network) -> list[float]:
    """Lightning's Trainer on batches of the same sizes, as one model's epochs: nothing federated."""
    timer, parts = RoundTimer(), torch.randperm(len(x)).view(CLIENTS, IMAGES)
    batches = [(x[rows], y[rows]) for own in parts for rows in own.split(BATCH)]
    with tempfile.TemporaryDirectory() as folder:
        quiet_trainer(folder, rounds, [timer]).fit(client(network), DataLoader(batches, batch_size=None))
    return timer.wall


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
    loop, timer = FederatedLoop(metrics=metrics, reporting=Reporting(table=False, figures=0)), RoundTimer()
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
            callbacks=[loop, timer],
        )
        trainer.fit(module or client(lenet), data)
    return timer.wall


def in_run(x: torch.Tensor, y: torch.Tensor, rounds: int, network: Network, every: int | None) -> list[float]:
    """Processor seconds of rounds with in-run values; None: without. Lightning validates in either."""
    share = 400 / len(x)
    data = FederatedDataModule(
        TensorDataset(x, y), IIDPartitioner(CLIENTS), batch_size=BATCH, splits=Splits(server_val=share)
    )
    values = {} if every is None else {"client_algorithm": InRunValues(every), "metrics": {"in_run": InRunShapley()}}
    loop = FederatedLoop(reporting=Reporting(table=False, figures=0), seed=0, **values)  # type: ignore[arg-type]
    timer = RoundTimer()
    with tempfile.TemporaryDirectory() as folder:
        quiet_trainer(folder, rounds, [loop, timer], limit_val_batches=1.0).fit(client(network), data)
    return timer.processor


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--network", choices=["lenet", "mlp"], default="lenet")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=5, help="how often each is run, turn by turn")
    parser.add_argument("--in-run", action="store_true", help="what in-run values add")
    options = parser.parse_args()
    be_quiet()
    rounds, network = options.rounds, {"lenet": lenet, "mlp": mlp}[options.network]
    x, y = images()
    ways: dict[str, Callable[[], list[float]]] = {
        "plain PyTorch": lambda: plain(x, y, rounds, network),
        "Lightning's Trainer alone": lambda: trainer_alone(x, y, rounds, network),
        "FederatedLoop, a user's module": lambda: federated(x, y, rounds, False, module=Own(network)),
        "FederatedLoop": lambda: federated(x, y, rounds, False, module=client(network)),
        "+ CSSV, TensorBoard, CSV": lambda: federated(x, y, rounds, True, module=client(network)),
        "+ progress bar, checkpoints": lambda: federated(x, y, rounds, True, True, module=client(network)),
    }
    if options.in_run:
        ways = {"without": partial(in_run, x, y, rounds, network, None)}
        ways |= {f"every={each}": partial(in_run, x, y, rounds, network, each) for each in (1, 2, 4, 8)}
    print(ratios(in_turns(ways, options.repeats)))


if __name__ == "__main__":
    main()
