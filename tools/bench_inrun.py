"""What in-run data Shapley costs a round.

    python tools/bench_inrun.py [--rounds 12] [--networks mlp lenet wide]

5 clients x 480 random images of 28x28, batch 24, SGD; 240 validation images at the server, which Lightning validates
on after every round in all runs. Processor time of a whole round. Federations with and without in-run values train in
one process and take turns after every round, so that what slows the machine down meets all: a ratio is that of
neighboring rounds. The table has the median of the ratios, the middle half of them, and the ratio of the least rounds.
``every`` is that of ``InRunValues``; of what it adds, *gradient* is what the validation gradient takes, once a round.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from typing import Any

import lightning as L
import torch
from common import be_quiet
from torch import nn
from torch.utils.data import TensorDataset

from flsv import ClassifierClient, FederatedDataModule, FederatedLoop, Reporting
from flsv.clients.algorithms import InRunValues
from flsv.data import IIDPartitioner, Splits
from flsv.games import ModelEvaluator
from flsv.metrics import InRunShapley
from flsv.parameters import ParameterSpace

CLIENTS, SAMPLES, VALIDATION, BATCH, WARM = 5, 2400, 240, 24, 2
WAYS: dict[str, int | None] = {"without": None, "every=1": 1, "every=2": 2, "every=4": 4, "every=8": 8}


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


class Turns:
    """Lets one of several threads run at a time."""

    def __init__(self) -> None:
        self._now: int | None = None
        self._changed = threading.Condition()

    def give(self, place: int | None) -> None:
        with self._changed:
            self._now = place
            self._changed.notify_all()

    def wait(self, place: int | None) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._now == place)


class InTurns(FederatedLoop):
    """Processor seconds of its rounds; after each it is the next federation's turn."""

    def on_train_start(self, *hook: Any) -> None:
        super().on_train_start(*hook)
        self.seconds: list[float] = []
        self._hand_over(None)

    def on_train_epoch_end(self, *hook: Any) -> None:
        super().on_train_epoch_end(*hook)
        self.seconds.append(time.thread_time() - self.start)
        self._hand_over((self.place + 1) % len(WAYS))

    def _hand_over(self, place: int | None) -> None:
        self.turns.give(place)
        self.turns.wait(self.place)
        self.start = time.thread_time()


def federation(
    network: Callable[[], nn.Module],
    data: tuple[TensorDataset, TensorDataset],
    turns: Turns,
    place: int,
    rounds: int,
    found: dict[int, list[float]],
) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    every = list(WAYS.values())[place]
    values = {} if every is None else {"client_algorithm": InRunValues(every), "metrics": {"in_run": InRunShapley()}}
    loop = InTurns(reporting=Reporting(table=False, figures=0), seed=0, **values)  # type: ignore[arg-type]
    loop.turns, loop.place = turns, place
    share = VALIDATION / (SAMPLES + VALIDATION)
    dealt = FederatedDataModule(data, IIDPartitioner(CLIENTS), batch_size=BATCH, splits=Splits(server_val=share))
    module = ClassifierClient(network(), num_classes=10, input_shape=(1, 28, 28))
    quiet = {f"enable_{what}": False for what in ("checkpointing", "progress_bar", "model_summary")}
    try:
        with tempfile.TemporaryDirectory() as folder:
            L.Trainer(
                max_epochs=rounds, accelerator="cpu", logger=False, default_root_dir=folder, callbacks=[loop], **quiet
            ).fit(module, dealt)
        found[place] = loop.seconds[WARM:]
    finally:
        turns.give((place + 1) % len(WAYS) if place in found else None)


def measure(network: Callable[[], nn.Module], data: tuple[TensorDataset, TensorDataset], rounds: int) -> str:
    turns, found, threads = Turns(), dict[int, list[float]](), []
    for place in range(len(WAYS)):
        turns.give(place)
        arguments = (network, data, turns, place, rounds + WARM, found)
        threads.append(threading.Thread(target=federation, args=arguments, daemon=True))
        threads[-1].start()
        turns.wait(None)
    turns.give(0)
    for thread in threads:
        thread.join()
    base = statistics.median(found[0])
    cells = [f"{base:.2f} s"]
    for place in range(1, len(WAYS)):
        more = [mine / base - 1 for mine, base in zip(found[place], found[0])]
        low, middle, high = statistics.quantiles(more)
        cells.append(f"{middle:+.0%} ({low:+.0%} to {high:+.0%}), {min(found[place]) / min(found[0]) - 1:+.0%}")
    return (
        f"| {network.__name__} | " + " | ".join([*cells, f"{gradient_seconds(network(), data[0]) / base:.1%}"]) + " |"
    )


def gradient_seconds(network: nn.Module, data: TensorDataset) -> float:
    """Median processor time of the gradient of the validation loss, in one batch."""
    space = ParameterSpace(network)
    evaluator = ModelEvaluator(network, space, [data[:VALIDATION]], num_classes=10)
    vector, seconds = space.read(network), []
    for _ in range(12):
        start = time.thread_time()
        evaluator.gradient(vector)
        seconds.append(time.thread_time() - start)
    return statistics.median(seconds[WARM:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--networks", nargs="+", default=["mlp", "lenet", "wide"])
    asked = parser.parse_args()
    be_quiet()
    draw = torch.Generator().manual_seed(0)
    sets = [
        TensorDataset(torch.randn(n, 1, 28, 28, generator=draw), torch.randint(10, (n,), generator=draw))
        for n in (SAMPLES + VALIDATION, 10)
    ]
    print("| network | " + " | ".join([*WAYS, "gradient"]) + " |")
    print("|---" * (len(WAYS) + 2) + "|")
    for network in (each for each in (mlp, lenet, wide) if each.__name__ in asked.networks):
        print(measure(network, (sets[0], sets[1]), asked.rounds), flush=True)


if __name__ == "__main__":
    main()
