"""What it costs to evaluate coalition models by what they log when they validate.

    python tools/bench_utility.py [--models 64] [--samples 2000] [--batch 100]

The same vectors, one after the other, in three ways that take turns, some models at a time, in one process: by hand
(one copy of the module, ``validation_step`` called on the batches in memory, what it logs averaged by batch size),
``ValidatedModels`` (Lightning's whole validation, in a fresh copy for every model), and a new ``trainer.validate`` for
every model. Prints times, the median of the ratios to the way by hand, and the largest difference of the values. One
thread.
"""

from __future__ import annotations

import argparse
import copy
import logging
import os
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from flsv import ParameterSpace
from flsv._lightning.validation import keep_batches
from flsv.games import ValidatedModels
from flsv.models import LeNet5

BLOCK = 8
QUIET: dict[str, Any] = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "accelerator": "cpu",
    "max_epochs": 1,
}


class Classifier(L.LightningModule):
    """As everybody writes it."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return F.cross_entropy(self.net(x), y)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        logits = self.net(x)
        self.log("val_loss", F.cross_entropy(logits, y))
        self.log("val_acc", (logits.argmax(-1) == y).float().mean())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Timed(L.Callback):
    """Takes the times in the middle of a fit."""

    def __init__(self, loader: DataLoader, models: int) -> None:
        self.loader, self.models = loader, models

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        space = ParameterSpace(pl_module)
        noise = torch.randn(self.models, space.size, generator=torch.Generator().manual_seed(0))
        vectors = space.read(pl_module) + 0.01 * noise
        batches, own = list(self.loader), copy.deepcopy(pl_module).eval()
        logged: list[tuple[str, float]] = []
        own.log = lambda name, value, **_: logged.append((name, float(value)))  # type: ignore[method-assign]

        @torch.inference_mode()
        def by_hand(rows: Tensor) -> list[float]:
            values = []
            for row in rows:
                space.write(own, row)
                total = 0.0
                for index, batch in enumerate(batches):
                    logged.clear()
                    own.validation_step(batch, index)
                    total += dict(logged)["val_loss"] * len(batch[1])
                values.append(total / sum(len(batch[1]) for batch in batches))
            return values

        evaluate = ValidatedModels(trainer, space, keep_batches(trainer, self.loader), names=["val_loss"])

        def anew(rows: Tensor) -> list[float]:
            values = []
            for row in rows:
                module = copy.deepcopy(pl_module)
                space.write(module, row)
                validating = L.Trainer(**QUIET)
                validating.validate(module, self.loader, verbose=False)
                values.append(float(validating.callback_metrics["val_loss"]))
            return values

        ways: dict[str, Callable[[Tensor], list[float]]] = {
            "validation_step by hand": by_hand,
            "ValidatedModels": lambda rows: evaluate(rows).value("val_loss").tolist(),
            "trainer.validate": anew,
        }
        self.seconds: dict[str, list[float]] = {name: [] for name in ways}
        self.values: dict[str, list[float]] = {name: [] for name in ways}
        for way in ways.values():
            way(vectors[:1])
        for block in vectors.split(BLOCK):
            for name, way in ways.items():
                start = time.perf_counter()
                self.values[name] += way(block)
                self.seconds[name].append((time.perf_counter() - start) / len(block))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=int, default=64)
    parser.add_argument("--samples", type=int, default=2000)
    parser.add_argument("--batch", type=int, default=100)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.manual_seed(0)
    images = TensorDataset(torch.randn(arguments.samples, 1, 28, 28), torch.randint(10, (arguments.samples,)))
    networks = {
        "softmax regression": nn.Sequential(nn.Flatten(), nn.Linear(784, 10)),
        "MLP 784-200-10": nn.Sequential(nn.Flatten(), nn.Linear(784, 200), nn.ReLU(), nn.Linear(200, 10)),
        "LeNet5": LeNet5(num_classes=10, input_shape=(1, 28, 28)),
    }
    table = Table("network", "way", "ms/model", "median ratio", "values differ by at most")
    for name, network in networks.items():
        loader = DataLoader(images, batch_size=arguments.batch)
        timed = Timed(loader, arguments.models)
        L.Trainer(**QUIET, limit_train_batches=1, callbacks=[timed]).fit(Classifier(network), loader)
        base = timed.seconds["validation_step by hand"]
        expected = torch.tensor(timed.values["validation_step by hand"])
        for way, seconds in timed.seconds.items():
            ratio = statistics.median(a / b for a, b in zip(seconds, base))
            differ = (torch.tensor(timed.values[way]) - expected).abs().max().item()
            table.add_row(name, way, f"{1000 * statistics.median(seconds):.1f}", f"{ratio:.2f}", f"{differ:.1e}")
    Console().print(table)
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, torch {torch.__version__}")


if __name__ == "__main__":
    main()
