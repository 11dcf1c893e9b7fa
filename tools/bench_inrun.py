"""What in-run data Shapley costs a round.

    python tools/bench_inrun.py [--repeats 3] [--networks mlp lenet wide]

5 clients x 480 random images of 28x28, batch 24, SGD; 240 validation images at the server, which Lightning validates
on after every round in all runs. Processor time of a whole round, the least over the rounds; runs with and without take
turns in one process. ``every`` is that of ``InRunValues``.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from common import Timed, be_quiet, round_times
from torch import nn
from torch.utils.data import TensorDataset

from flsv import ClassifierClient, FederatedDataModule
from flsv.clients.algorithms import InRunValues
from flsv.data import IIDPartitioner
from flsv.metrics import InRunShapley

CLIENTS, SAMPLES, VALIDATION, BATCH, ROUNDS = 5, 2400, 240, 24, 3


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(784, 200), nn.ReLU(), nn.Linear(200, 200), nn.ReLU(), nn.Linear(200, 10)
    )


def lenet() -> nn.Module:
    first = [nn.Conv2d(1, 6, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2)]
    last = [nn.Flatten(), nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10)]
    return nn.Sequential(*first, *last)


def wide() -> nn.Module:
    first = [nn.Conv2d(1, 32, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(32, 64, 5, padding=2), nn.ReLU()]
    return nn.Sequential(*first, nn.MaxPool2d(2), nn.Flatten(), nn.Linear(3136, 512), nn.ReLU(), nn.Linear(512, 10))


def rounds(network: Any, data: tuple[TensorDataset, TensorDataset], every: int | None, order: Any = 1) -> list[float]:
    torch.manual_seed(0)
    values = {} if every is None else {"client_algorithm": InRunValues(every)}
    metrics = {} if every is None else {"metrics": {"in_run": InRunShapley(order=order)}}
    loop = Timed(print_table=False, figures_every=0, seed=0, **values, **metrics)  # type: ignore[arg-type]
    share = VALIDATION / (SAMPLES + VALIDATION)
    dealt = FederatedDataModule(data, IIDPartitioner(CLIENTS), batch_size=BATCH, server_val_fraction=share)
    module = ClassifierClient(network(), num_classes=10, input_shape=(1, 28, 28))
    return round_times(loop, module, dealt, ROUNDS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--networks", nargs="+", default=["mlp", "lenet", "wide"])
    asked = parser.parse_args()
    be_quiet()
    draw = torch.Generator().manual_seed(0)
    sets = [
        TensorDataset(torch.randn(n, 1, 28, 28, generator=draw), torch.randint(10, (n,), generator=draw))
        for n in (SAMPLES + VALIDATION, 10)
    ]
    ways: dict[str, tuple[int | None, int]] = {
        "without": (None, 1),
        "every=1": (1, 1),
        "every=2": (2, 1),
        "every=4": (4, 1),
    }
    print("| network | " + " | ".join(ways) + " |")
    print("|---" * (len(ways) + 1) + "|")
    for network in (each for each in (mlp, lenet, wide) if each.__name__ in asked.networks):
        found: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(asked.repeats):
            for name, (every, order) in ways.items():
                found[name] += rounds(network, (sets[0], sets[1]), every, order)
        base = min(found["without"])
        cells = [f"{base:.2f} s", *(f"{min(found[name]) / base - 1:+.0%}" for name in list(ways)[1:])]
        print(f"| {network.__name__} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
