"""What is measured of the federations behind ShapFed's tables and figures (``tables/shapfed.yaml``).

A column is an experiment: data, partition, network and training. A row is an algorithm of ``configs/``.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from itertools import islice
from typing import Any

import lightning as L
from table_runs import Cell, Measured, built, federated_loop

from flsv import FederatedLoop
from flsv.cli.own_models import OwnModels
from flsv.data import FederatedDataModule

#: Of all columns, in the page's order.
TABLES = (
    "PneumoniaMNIST, heterogeneous",
    "Fashion-MNIST, imbalanced",
    "Fashion-MNIST, heterogeneous",
    "CIFAR-10, imbalanced",
    "CIFAR-10, heterogeneous",
    "HAM10000, made-up clinics",
)
ROWS = ("Individual", "FedAvg", "FedAvg, by samples", "CGSV", "ShapFed-WA", "ShapFed-WA, by samples", "ShapFed")
OURS, OTHERS = ("ShapFed-WA", "ShapFed-WA, by samples", "ShapFed"), ("FedAvg", "FedAvg, by samples", "CGSV")
#: Of figure 5, of one run of FedAvg.
VALUES = ("cssv", "cssv_of_weights", "cgsv", "true")
#: Rounds between two tests on the way, for the figures that are curves.
EVERY = {"CIFAR-10, imbalanced": 2, "HAM10000, made-up clinics": 3}


def short(cell: Cell) -> dict[str, Any]:
    """Beside one round: enough images for every client to have one, for EfficientNet's batch statistics two."""
    images = 300 if cell.column.startswith("HAM10000") else 100
    return {"data.splits.max_samples": images, "data.loader.eval_batch_size": 16, "trainer.limit_test_batches": 1}


# ---- what is measured


class Tested(OwnModels):
    """Tests the clients' and the global models after the last round, and every so many rounds before it.

    Attributes:
        curve: ``[(rounds, scores)]``.
    """

    def __init__(self, loop: FederatedLoop, every: int = 0) -> None:
        super().__init__(loop)
        self.every, self.curve, self.all_seconds = every, [], 0.0
        self._limit: int | None = None

    def _batches(self, data: FederatedDataModule) -> Iterable[Any]:
        return islice(super()._batches(data), self._limit)

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if isinstance(trainer.limit_test_batches, int):
            self._limit = trainer.limit_test_batches
        super().on_fit_start(trainer, pl_module)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        rounds = trainer.current_epoch + 1
        if self.every and rounds % self.every == 0 and rounds != trainer.max_epochs:
            self._test(trainer, pl_module, rounds)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._test(trainer, pl_module, int(trainer.max_epochs or 0))

    def _test(self, trainer: L.Trainer, pl_module: L.LightningModule, rounds: int) -> None:
        super().on_train_end(trainer, pl_module)
        self.all_seconds += self.seconds
        scores = {models: (100 * found["balanced_accuracy"]).tolist() for models, found in self.scores.items()}
        self.curve.append([rounds, scores])


def at_the_end(cell: Cell, root: str) -> Measured:
    """Balanced accuracies after the last round, and the class-specific values, where the run has them."""
    return _tested(cell, root, every=0)


def on_the_way(cell: Cell, root: str) -> Measured:
    """As :func:`at_the_end`, and ``curve``."""
    return _tested(cell, root, every=EVERY[cell.column])


def values(cell: Cell, root: str) -> Measured:
    """All metrics' values, a list per client."""
    with built(cell, root) as cli:
        loop = federated_loop(cli.trainer)
        L.seed_everything(cell.seed, verbose=False)
        cli.trainer.fit(cli.model, cli.datamodule)
    found = {name: loop.contributions[name] for name in loop.metrics}
    if cell.column == "figure 5":
        found = {name: loop.metrics[name].per_client(value) for name, value in found.items()}
    return {name: value.tolist() for name, value in found.items()}


def _tested(cell: Cell, root: str, every: int) -> Measured:
    with built(cell, root, **{"federation.evaluation.keep_trained": True}) as cli:
        loop = federated_loop(cli.trainer)
        tested = Tested(loop, every)
        cli.trainer.callbacks.append(tested)  # type: ignore[attr-defined]
        L.seed_everything(cell.seed, verbose=False)  # all rows start from the same weights
        start = time.perf_counter()
        cli.trainer.fit(cli.model, cli.datamodule)
        seconds = time.perf_counter() - start - tested.all_seconds
    cssv = loop.contributions.get("cssv")
    return {
        **tested.curve[-1][1],
        "seconds": seconds,
        "cssv": None if cssv is None else cssv.tolist(),
        **({"curve": tested.curve} if every else {}),
    }
