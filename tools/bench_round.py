"""What a federated round costs over plain PyTorch, and what in-run data Shapley adds to it.

    python tools/bench_round.py [--network lenet] [--rounds 5] [--repeats 5] [--images 600]
    python tools/bench_round.py --in-run
    python tools/bench_round.py --memory [--repeats 5]

Ten clients train LeNet5 or an MLP (784-200-200-10) on Fashion-MNIST images of ``$FLSV_DATA_ROOT``, else on random
ones: batches of 32, one local epoch, SGD 0.01, one thread. Compared turn by turn in one process are a PyTorch loop on
preloaded tensors, Lightning's Trainer on as many batches of one model, and ``FederatedLoop`` with more and more
output. ``--in-run`` compares ``InRunValues`` by ``every``, ``--memory`` the largest memory of 8 clients with 10
million parameters. Another version is measured by ``PYTHONPATH=OTHER python tools/bench_round.py``.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import resource
import tempfile
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

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
    clients = list(torch.randperm(len(x)).view(CLIENTS, -1))
    return [
        wall for wall, _ in plain_rounds(network().to(x.device), x, y, clients, rounds, 0.01, BATCH)
    ]


def trainer_alone(x: torch.Tensor, y: torch.Tensor, rounds: int, network: Network) -> list[float]:
    """Lightning's Trainer on batches of the same sizes, as one model's epochs: nothing federated."""
    timer, parts = RoundTimer(), torch.randperm(len(x)).view(CLIENTS, -1)
    batches = [(x[rows], y[rows]) for own in parts for rows in own.split(BATCH)]
    with tempfile.TemporaryDirectory() as folder:
        quiet_trainer(folder, rounds, [timer]).fit(
            client(network), DataLoader(batches, batch_size=None)
        )
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


class Large(Own):
    """A user's plain module of 10 million parameters, with Adam."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-4)


def large() -> nn.Module:
    return MLP(num_classes=10, input_shape=(1, 28, 28), hidden=(2816, 2816))


def memory(state: Literal["reset", "persist"] | None) -> int:
    """Largest memory of this process in MiB, by what becomes of optimizers' state; None: of a Trainer alone."""
    be_quiet()
    samples = TensorDataset(torch.randn(8 * BATCH, 1, 28, 28), torch.randint(10, (8 * BATCH,)))
    data: Any = DataLoader(samples, BATCH)
    callbacks: list[L.Callback] = []
    if state is not None:
        data = FederatedDataModule(
            samples, IIDPartitioner(8), batch_size=BATCH, splits=Splits(server_val=0)
        )
        callbacks = [
            FederatedLoop(optimizer_state=state, reporting=Reporting(table=False, figures=0))
        ]
    with tempfile.TemporaryDirectory() as folder:
        quiet_trainer(folder, 3, callbacks).fit(Large(large), data)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


def memories(repeats: int) -> None:
    """Print the largest memory of processes that are made anew, in turns."""
    os.environ["MALLOC_MMAP_THRESHOLD_"] = str(
        2**20
    )  # freed tensors are given back at once: no chance in the figures
    names = {
        "Lightning's Trainer alone": None,
        "optimizers reset": "reset",
        "optimizers persist": "persist",
    }
    for name, state in [*names.items()] * repeats:
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            print(f"{name}: {pool.apply(memory, (state,))} MiB", flush=True)


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
    parser.add_argument(
        "--memory", action="store_true", help="the largest memory, of 10 million parameters"
    )
    options = parser.parse_args()
    if options.memory:
        return memories(options.repeats)
    be_quiet()
    rounds, network = options.rounds, {"lenet": lenet, "mlp": mlp}[options.network]
    x, y = images(CLIENTS * options.images)
    ways: dict[str, Callable[[], list[float]]] = {
        "plain PyTorch": lambda: plain(x, y, rounds, network),
        "Lightning's Trainer alone": lambda: trainer_alone(x, y, rounds, network),
        "FederatedLoop, a user's module": lambda: federated(
            x, y, rounds, False, module=Own(network)
        ),
        "FederatedLoop": lambda: federated(x, y, rounds, False, module=client(network)),
        "+ CSSV, TensorBoard, CSV": lambda: federated(x, y, rounds, True, module=client(network)),
        "+ progress bar, checkpoints": lambda: federated(
            x, y, rounds, True, True, module=client(network)
        ),
    }
    if options.in_run:
        ways = {"without": partial(in_run, x, y, rounds, network, None)}
        ways |= {
            f"every={each}": partial(in_run, x, y, rounds, network, each) for each in (1, 2, 4, 8)
        }
    print(ratios(in_turns(ways, options.repeats)))


if __name__ == "__main__":
    main()
