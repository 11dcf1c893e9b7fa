"""Many small clients at once: what a round of ``engine="vmap"`` costs.

    python tools/bench_vmap.py [--repeats 5] [--networks softmax mlp wide lenet] [--chunks 25 50 100]

Clients x 600 Fashion-MNIST-like images, batch 32, SGD, one thread. Two plain PyTorch loops over the clients, nothing of
Lightning: one that gathers each batch with an ``index_select`` (the leanest that shuffles), and one with a shuffling
``DataLoader`` over a ``TensorDataset``, as most people write it. Then the batched computation alone, the sequential
engine, and the batched one with so many clients at once: a round's local training, without the server.

All turn by turn in one process. CPU seconds and wall are the least over the rounds; the ratios are to the gathering
loop (and, last column, CPU to the one with a DataLoader), medians over the turns, in each of which both are measured.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from common import be_quiet, grid, quiet_trainer
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset

from flsv import ClassifierClient, FederatedDataModule, FederatedLoop, Reporting
from flsv.clients.kernel import GatheredBatches, RowTraining
from flsv.data import IIDPartitioner, Splits
from flsv.engines.vmap import ON_CPU, VmapProcess

IMAGES, BATCH, CLASSES, SHAPE, ROUNDS = 600, 32, 10, (1, 28, 28), 3
Seconds = tuple[float, float]
Batches = Callable[[TensorDataset, int], Iterator[Any]]
GATHERING, LOADING = "plain loop, gathering", "plain loop, DataLoader"


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

    def on_train_start(self, *hook: Any) -> None:
        super().on_train_start(*hook)
        self.rounds: list[Seconds] = []
        engine = self._fit.running.engine
        self.end_training = engine.end_training
        engine.end_training = self.ended  # type: ignore[method-assign]

    def on_train_epoch_start(self, *hook: Any) -> None:
        super().on_train_epoch_start(*hook)
        self.start = time.process_time(), time.perf_counter()

    def ended(self) -> Any:
        self.rounds.append(_since(self.start))
        return self.end_training()


def gathered(data: TensorDataset, client: int) -> Iterator[Any]:
    for rows in (client * IMAGES + torch.randperm(IMAGES)).split(BATCH):
        yield [tensor.index_select(0, rows) for tensor in data.tensors]


def loaded(data: TensorDataset, client: int) -> Iterator[Any]:
    own = Subset(data, range(client * IMAGES, (client + 1) * IMAGES))
    yield from DataLoader(own, batch_size=BATCH, shuffle=True)


def plain(network: nn.Module, data: TensorDataset, clients: int, batches: Batches) -> Seconds:
    start = time.process_time(), time.perf_counter()
    models = []
    for client in range(clients):
        model = copy.deepcopy(network)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for x, y in batches(data, client):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        models.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    torch.stack(models)
    return _since(start)


def computation(network: nn.Module, data: TensorDataset, clients: int) -> Seconds:
    """What ``engine="vmap"`` trains with, without clients that begin and end."""
    start = time.process_time(), time.perf_counter()
    module = ClassifierClient(network, num_classes=CLASSES, input_shape=SHAPE)
    names = dict(module.named_parameters())
    for first in range(0, clients, ON_CPU):
        chunk = range(first, min(first + ON_CPU, clients))
        states = {name: p.detach().expand(len(chunk), *p.shape).clone() for name, p in names.items()}
        rows = [(client * IMAGES + torch.randperm(IMAGES)).split(BATCH) for client in chunk]
        training = RowTraining(module, torch.optim.SGD(module.parameters(), lr=0.05))
        training.train(states, GatheredBatches(data.tensors, rows))
    return _since(start)


def federated(network: nn.Module, data: FederatedDataModule, engine: Any) -> list[Seconds]:
    module = ClassifierClient(
        copy.deepcopy(network), optimizer=partial(torch.optim.SGD, lr=0.05), num_classes=CLASSES, input_shape=SHAPE
    )
    loop = Timed(engine=engine, reporting=Reporting(table=False, figures=0), seed=0)
    with tempfile.TemporaryDirectory() as folder:
        quiet_trainer(folder, ROUNDS + 1, [loop]).fit(module, data)
    return loop.rounds[1:]  # the first one has the trial


def measure(name: str, chunks: list[int], repeats: int) -> list[list[str]]:
    make, clients = CASES[name]
    torch.manual_seed(0)
    network = make()
    tensors = TensorDataset(torch.rand(clients * IMAGES, *SHAPE), torch.randint(CLASSES, (clients * IMAGES,)))
    data = FederatedDataModule(tensors, IIDPartitioner(clients), batch_size=BATCH, splits=Splits(server_val=0))
    ways: dict[str, Callable[[], list[Seconds]]] = {
        GATHERING: lambda: several(lambda: plain(network, tensors, clients, gathered)),
        LOADING: lambda: several(lambda: plain(network, tensors, clients, loaded)),
        f"batched computation alone, {min(ON_CPU, clients)} at once": lambda: several(
            lambda: computation(network, tensors, clients)
        ),
        'engine="sequential"': lambda: federated(network, data, "sequential"),
    }
    for chunk in sorted({min(chunk, clients) for chunk in chunks}):
        ways[f'engine="vmap", {chunk} at once'] = partial(federated, network, data, partial(VmapProcess, chunk=chunk))
    turns: dict[str, list[list[float]]] = {way: [] for way in ways}
    for _ in range(repeats):
        for way, run in ways.items():
            turns[way].append([min(seconds) for seconds in zip(*run())])
    size = sum(p.numel() for p in network.parameters())
    return [
        [
            f"{name} ({size:,}), {clients} clients",
            way,
            *(f"{min(seconds):.3f}" for seconds in zip(*found)),
            *(_ratio(found, turns[GATHERING], which) for which in (0, 1)),
            _ratio(found, turns[LOADING], 0),
        ]
        for way, found in turns.items()
    ]


def several(round: Callable[[], Seconds]) -> list[Seconds]:
    """As many as a federation is measured on."""
    return [round() for _ in range(ROUNDS)]


def _ratio(mine: list[list[float]], base: list[list[float]], which: int) -> str:
    return f"{statistics.median(a[which] / b[which] for a, b in zip(mine, base)):.2f}"


def _since(start: Seconds) -> Seconds:
    return time.process_time() - start[0], time.perf_counter() - start[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--networks", nargs="+", default=["softmax", "mlp", "wide", "lenet"], choices=sorted(CASES))
    parser.add_argument("--chunks", nargs="+", type=int, default=[25, 50, 100])
    options = parser.parse_args()
    be_quiet()
    head = ["network (parameters)", "way", "CPU s a round", "wall s", "CPU ratio", "wall ratio", "CPU to DataLoader"]
    print(grid([head, *(row for name in options.networks for row in measure(name, options.chunks, options.repeats))]))


if __name__ == "__main__":
    main()
