"""What in-run data Shapley costs a round.

    python tools/bench_inrun.py [--repeats 7] [--rounds 5] [--networks mlp lenet wide]

5 clients x 480 random images of 28x28, batch 24, SGD; 240 validation images at the server, which Lightning validates
on after every round in all runs. Processor time of a whole round; runs with and without take turns in one process. A
turn's ratio is that of the least of each run's rounds, and the table has the median over the turns, and their range.
``every`` is that of ``InRunValues``.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

import torch
from common import Timed, be_quiet, round_times
from torch import nn
from torch.utils.data import TensorDataset

from flsv import ClassifierClient, FederatedDataModule
from flsv.clients.algorithms import InRunValues
from flsv.data import IIDPartitioner
from flsv.metrics import InRunShapley

CLIENTS, SAMPLES, VALIDATION, BATCH = 5, 2400, 240, 24


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


def rounds(network: Any, data: tuple[TensorDataset, TensorDataset], every: int | None, count: int) -> list[float]:
    torch.manual_seed(0)
    values = {} if every is None else {"client_algorithm": InRunValues(every)}
    metrics = {} if every is None else {"metrics": {"in_run": InRunShapley()}}
    loop = Timed(print_table=False, figures_every=0, seed=0, **values, **metrics)  # type: ignore[arg-type]
    share = VALIDATION / (SAMPLES + VALIDATION)
    dealt = FederatedDataModule(data, IIDPartitioner(CLIENTS), batch_size=BATCH, server_val_fraction=share)
    module = ClassifierClient(network(), num_classes=10, input_shape=(1, 28, 28))
    return round_times(loop, module, dealt, count)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--networks", nargs="+", default=["mlp", "lenet", "wide"])
    asked = parser.parse_args()
    be_quiet()
    draw = torch.Generator().manual_seed(0)
    sets = [
        TensorDataset(torch.randn(n, 1, 28, 28, generator=draw), torch.randint(10, (n,), generator=draw))
        for n in (SAMPLES + VALIDATION, 10)
    ]
    ways: dict[str, int | None] = {"without": None, "every=1": 1, "every=2": 2, "every=4": 4}
    print("| network | " + " | ".join(ways) + " |")
    print("|---" * (len(ways) + 1) + "|")
    for network in (each for each in (mlp, lenet, wide) if each.__name__ in asked.networks):
        turns: list[dict[str, float]] = []
        for _ in range(asked.repeats):
            turn = {name: min(rounds(network, (sets[0], sets[1]), every, asked.rounds)) for name, every in ways.items()}
            turns.append(turn)
        more = {name: [turn[name] / turn["without"] - 1 for turn in turns] for name in list(ways)[1:]}
        base = min(turn["without"] for turn in turns)
        cells = [
            f"{base:.2f} s",
            *(f"{statistics.median(each):+.0%} ({min(each):+.0%} to {max(each):+.0%})" for each in more.values()),
        ]
        print(f"| {network.__name__} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
