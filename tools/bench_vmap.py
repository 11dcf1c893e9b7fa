"""Many small clients at once: what a round of ``engine="vmap"`` costs.

    python tools/bench_vmap.py [--repeats 2] [--networks softmax mlp wide lenet] [--chunks 25 50 100]

Clients x 600 Fashion-MNIST-like images, batch 32, SGD, one thread. A plain PyTorch loop over the clients (the same
batches gathered, nothing of Lightning), the batched computation alone, the sequential engine, and the batched one with
so many clients at once, turn by turn in one process: a round's local training, without the server. CPU seconds and
wall, the least over the rounds, so that a busy machine disturbs less; the ratio is to the plain loop's.
"""

from __future__ import annotations

import argparse
import copy
import tempfile
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from common import be_quiet, grid, quiet_trainer
from torch import nn
from torch.utils.data import TensorDataset

from flsv import ClassifierClient, FederatedDataModule, FederatedLoop
from flsv.clients.batched import BatchedTraining
from flsv.clients.stacked_batches import GatheredBatches
from flsv.data import IIDPartitioner
from flsv.engines.vmap import ON_CPU, VmapProcess

IMAGES, BATCH, CLASSES, SHAPE, ROUNDS = 600, 32, 10, (1, 28, 28), 3
Seconds = tuple[float, float]


def softmax() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(784, CLASSES))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 64), nn.ReLU(), nn.Linear(64, CLASSES))


def wide() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 200), nn.ReLU(), nn.Linear(200, CLASSES))


def lenet() -> nn.Module:
    layers = [nn.Conv2d(1, 10, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(10, 20, 5), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(320, 50), nn.ReLU(), nn.Linear(50, CLASSES))


#: Network and number of clients.
CASES: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "softmax": (softmax, 100),
    "mlp": (mlp, 50),
    "wide": (wide, 50),
    "lenet": (lenet, 10),
}


class Timed(FederatedLoop):
    """Times the cohort's local training, from the start of its first client to the end of its last."""

    def on_train_epoch_start(self, *hook: Any) -> None:
        self.rounds = getattr(self, "rounds", [])
        super().on_train_epoch_start(*hook)
        self.start = time.process_time(), time.perf_counter()

    def _end_round(self, trainer: Any) -> None:
        self.rounds.append(_since(self.start))
        super()._end_round(trainer)


def plain(network: nn.Module, x: torch.Tensor, y: torch.Tensor, clients: int) -> list[Seconds]:
    start = time.process_time(), time.perf_counter()
    models = []
    for client in range(clients):
        model = copy.deepcopy(network)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for rows in (client * IMAGES + torch.randperm(IMAGES)).split(BATCH):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x.index_select(0, rows)), y.index_select(0, rows))
            loss.backward()
            optimizer.step()
        models.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    torch.stack(models)
    return [_since(start)]


def computation(network: nn.Module, x: torch.Tensor, y: torch.Tensor, clients: int) -> list[Seconds]:
    """What ``engine="vmap"`` trains with, without clients that begin and end."""
    start = time.process_time(), time.perf_counter()
    module = ClassifierClient(network, num_classes=CLASSES, input_shape=SHAPE)
    names = dict(module.named_parameters())
    for first in range(0, clients, ON_CPU):
        chunk = range(first, min(first + ON_CPU, clients))
        states = {name: p.detach().expand(len(chunk), *p.shape).clone() for name, p in names.items()}
        rows = [(client * IMAGES + torch.randperm(IMAGES)).split(BATCH) for client in chunk]
        training = BatchedTraining(module, torch.optim.SGD(module.parameters(), lr=0.05))
        training.train(states, GatheredBatches((x, y), rows))
    return [_since(start)]


def federated(network: nn.Module, data: FederatedDataModule, engine: Any) -> list[Seconds]:
    module = ClassifierClient(
        copy.deepcopy(network), optimizer=partial(torch.optim.SGD, lr=0.05), num_classes=CLASSES, input_shape=SHAPE
    )
    loop = Timed(engine=engine, print_table=False, figures_every=0, seed=0)
    with tempfile.TemporaryDirectory() as folder:
        quiet_trainer(folder, ROUNDS + 1, [loop]).fit(module, data)
    return loop.rounds[1:]  # the first one has the trial


def measure(name: str, chunks: list[int], repeats: int) -> list[list[str]]:
    make, clients = CASES[name]
    torch.manual_seed(0)
    network = make()
    x, y = torch.rand(clients * IMAGES, *SHAPE), torch.randint(CLASSES, (clients * IMAGES,))
    data = FederatedDataModule(TensorDataset(x, y), IIDPartitioner(clients), batch_size=BATCH, server_val_fraction=0)
    ways: dict[str, Callable[[], list[Seconds]]] = {
        "plain loop": lambda: plain(network, x, y, clients),
        f"batched computation alone, {min(ON_CPU, clients)} at once": lambda: computation(network, x, y, clients),
        'engine="sequential"': lambda: federated(network, data, "sequential"),
    }
    for chunk in sorted({min(chunk, clients) for chunk in chunks}):
        ways[f'engine="vmap", {chunk} at once'] = partial(federated, network, data, partial(VmapProcess, chunk=chunk))
    found: dict[str, list[Seconds]] = {}
    for _ in range(repeats):
        for way, run in ways.items():
            found.setdefault(way, []).extend(run())
    least = {way: [min(seconds) for seconds in zip(*rounds)] for way, rounds in found.items()}
    size = sum(p.numel() for p in network.parameters())
    return [
        [f"{name} ({size:,}), {clients} clients", way, *(f"{s:.2f}" for s in both), *_ratios(both, least["plain loop"])]
        for way, both in least.items()
    ]


def _ratios(mine: list[float], base: list[float]) -> list[str]:
    return [f"{a / b:.2f}" for a, b in zip(mine, base)]


def _since(start: Seconds) -> Seconds:
    return time.process_time() - start[0], time.perf_counter() - start[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--networks", nargs="+", default=["softmax", "mlp", "wide", "lenet"], choices=sorted(CASES))
    parser.add_argument("--chunks", nargs="+", type=int, default=[25, 50, 100])
    options = parser.parse_args()
    be_quiet()
    head = ["network (parameters)", "way", "CPU s a round", "wall s", "CPU ratio", "wall ratio"]
    print(grid([head, *(row for name in options.networks for row in measure(name, options.chunks, options.repeats))]))


if __name__ == "__main__":
    main()
