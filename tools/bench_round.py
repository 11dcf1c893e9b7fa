"""What a federated round costs over plain PyTorch, and what in-run data Shapley adds to it.

    python tools/bench_round.py [--network lenet] [--rounds 5] [--repeats 5] [--images 600]
    python tools/bench_round.py --in-run

Ten clients train LeNet5 or an MLP (784-200-200-10) on Fashion-MNIST images of ``$FLSV_DATA_ROOT``, else on random
ones: batches of 32, one local epoch, SGD 0.01, one thread. Compared turn by turn in one process are a PyTorch loop on
preloaded tensors, Lightning's Trainer on as many batches of one model, and ``FederatedLoop`` with more and more
output. ``--in-run`` compares ``InRunValues`` by ``every``. Another version is measured by
``PYTHONPATH=OTHER python tools/bench_round.py``.
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
from flsv.contrib import InRunShapley, InRunValues
from flsv.data import IIDPartitioner, Splits
from flsv.metrics import ClassSpecificShapley
from flsv.models import MLP, LeNet5

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


def plain(x: torch.Tensor, y: torch.Tensor, rounds: int, network: Network = lenet) -> list[float]:
    """Federated averaging and nothing else."""
    clients = list(torch.randperm(len(x)).view(CLIENTS, -1))
    return [
        wall for wall, _ in plain_rounds(network().to(x.device), x, y, clients, rounds, 0.01, BATCH)
    ]


def trainer_alone(
    x: torch.Tensor,
    y: torch.Tensor,
    rounds: int,
    network: Network = lenet,
    accelerator: str = "cpu",
) -> list[float]:
    """Lightning's Trainer on batches of the same sizes, as one model's epochs: nothing federated."""
    timer, parts = RoundTimer(), torch.randperm(len(x)).view(CLIENTS, -1)
    batches = [(x[rows], y[rows]) for part in parts for rows in part.split(BATCH)]
    with tempfile.TemporaryDirectory() as folder:
        trainer = quiet_trainer(folder, rounds, [timer], accelerator)
        trainer.fit(client(network), DataLoader(batches, batch_size=None))
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
        TensorDataset(x, y),
        IIDPartitioner(CLIENTS),
        batch_size=BATCH,
        splits=Splits(server_val=0),
        **options,
    )
    metrics = {"cssv": ClassSpecificShapley()} if measured else {}
    loop, timer = (
        FederatedLoop(metrics=metrics, reporting=Reporting(table=False, figures=0)),
        RoundTimer(),
    )
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


def in_run(
    x: torch.Tensor, y: torch.Tensor, rounds: int, network: Network, every: int | None
) -> list[float]:
    """Processor seconds of rounds with in-run values; None: without. Lightning validates in either."""
    share = 400 / len(x)
    data = FederatedDataModule(
        TensorDataset(x, y),
        IIDPartitioner(CLIENTS),
        batch_size=BATCH,
        splits=Splits(server_val=share),
    )
    values = (
        {}
        if every is None
        else {"client_algorithm": InRunValues(every), "metrics": {"in_run": InRunShapley()}}
    )
    loop = FederatedLoop(reporting=Reporting(table=False, figures=0), seed=0, **values)  # type: ignore[arg-type]
    timer = RoundTimer()
    with tempfile.TemporaryDirectory() as folder:
        quiet_trainer(folder, rounds, [loop, timer], limit_val_batches=1.0).fit(
            client(network), data
        )
    return timer.processor


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--network", choices=["lenet", "mlp"], default="lenet")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--repeats", type=int, default=5, help="how often each is run, turn by turn"
    )
    parser.add_argument("--images", type=int, default=IMAGES, help="of each client")
    parser.add_argument("--in-run", action="store_true", help="what in-run values add")
    options = parser.parse_args()
    be_quiet()
    rounds = options.rounds
    network = {"lenet": lenet, "mlp": mlp}[options.network]
    ways: dict[str, Callable[[], list[float]]]
    x, y = images(CLIENTS * options.images)
    if options.in_run:
        measured = partial(in_run, x, y, rounds, network)
        ways = {"without": partial(measured, every=None)}
        for every in (1, 2, 4, 8):
            title = f"every={every}"
            ways[title] = partial(measured, every=every)
    else:
        run = partial(federated, x, y, rounds)

        def loop_alone() -> list[float]:
            module = client(network)
            return run(measured=False, module=module)

        def with_values() -> list[float]:
            module = client(network)
            return run(measured=True, module=module)

        def with_comfort() -> list[float]:
            module = client(network)
            return run(measured=True, comfort=True, module=module)

        ways = {
            "plain PyTorch": partial(plain, x, y, rounds, network),
            "Lightning's Trainer alone": partial(trainer_alone, x, y, rounds, network),
            "FederatedLoop": loop_alone,
            "+ CSSV, TensorBoard, CSV": with_values,
            "+ progress bar, checkpoints": with_comfort,
        }
    seconds = in_turns(ways, options.repeats)
    print(ratios(seconds))


if __name__ == "__main__":
    main()
