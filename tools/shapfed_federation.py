"""The federations behind ShapFed's tables and figures (``shapfed_table.py``): configurations and what they measure.

A column is an experiment: data, partition, network and training. A row is an algorithm of ``configs/``.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice, product
from typing import Any

import lightning as L
from table_runs import Cell, Measured, built, federated_loop

from flsv import FederatedLoop
from flsv.cli.own_models import OwnModels
from flsv.data import FederatedDataModule

Files, Overrides = tuple[str, ...], dict[str, Any]
LR, MOMENTUM, DECAY = (f"model.init_args.optimizer.init_args.{name}" for name in ("lr", "momentum", "weight_decay"))
NETWORK, ROUNDS, SAMPLES = "model.init_args.network", "trainer.max_epochs", "data.splits.max_samples"
WEIGHTING, SCALE = "federation.aggregator.init_args.weighting", "federation.aggregator.init_args.scale"

ROWS: dict[str, tuple[Files, Overrides]] = {
    "Individual": (("separate.yaml",), {"data.splits.client_test": 0.0}),
    "FedAvg": (("fedavg.yaml",), {WEIGHTING: "uniform"}),  # equation 4
    "FedAvg, by samples": (("fedavg.yaml",), {}),
    "CGSV": (("cgsv.yaml",), {}),
    "ShapFed-WA": (("shapfed_wa.yaml",), {}),
    "ShapFed-WA, by samples": (("shapfed_wa.yaml",), {WEIGHTING: "samples"}),  # not the paper's
    "ShapFed": (("shapfed.yaml",), {}),
}
OURS, OTHERS = ("ShapFed-WA", "ShapFed-WA, by samples", "ShapFed"), ("FedAvg", "FedAvg, by samples", "CGSV")
VALUES = {  # of the figures: all kinds of values of one run of FedAvg
    "figure 3": {
        "cssv": {"class_path": "flsv.metrics.ClassSpecificShapley"},
        "true": {
            "class_path": "flsv.metrics.PartialFederatedShapley",
            "init_args": {"per_class": True, "estimator": "exact", "momentum": 0.9},
        },
    },
    "figure 5": {
        "cssv": {"class_path": "flsv.metrics.ClassSpecificShapley"},
        "cssv_of_weights": {"class_path": "flsv.metrics.ClassSpecificShapley", "init_args": {"source": "weights"}},
        "cgsv": {"class_path": "flsv.metrics.CosineGradientShapley"},
        "true": {
            "class_path": "flsv.metrics.PartialFederatedShapley",
            "init_args": {"performance": "balanced_accuracy", "estimator": "exact", "momentum": 0.9},
        },
    },
}


@dataclass(frozen=True)
class Experiment:
    """One column.

    Args:
        files: of ``configs/``, before the algorithm's.
        overrides: of the preset for two cores.
        full: what ``--full`` overrides in them: the paper's networks, rounds and data.
        full_files: files of ``--full``, where they are others.
        rows: row to further overrides; the rows themselves are those of ``ROWS``.
        every: rounds between two tests on the way, for the figures that are curves; 0: none.
    """

    files: Files
    overrides: Overrides
    full: Overrides = field(default_factory=dict)
    full_files: Files | None = None
    rows: Mapping[str, Overrides] = field(default_factory=dict)
    every: int = 0


# The paper gives neither centres nor training for figure 3. Local training has to be long enough for client 2 to learn
# its rare class 2 (9 % of its samples) within a round.
SYNTHETIC = Experiment(
    ("quickstart.yaml", "scenarios/shapfed_synthetic.yaml"),
    {
        ROUNDS: 10,
        NETWORK: "mlp",
        "model.init_args.network_args": {"hidden": [16]},
        LR: 0.05,
        MOMENTUM: 0.0,
        "data.batch_size": 32,
        "federation.local_epochs": 10,
        "data.splits.client_test": 0.0,
    },
)
# The paper's training; equal volumes for figure 5, as its text has it.
XRAYS: Overrides = {NETWORK: "shapfed_cnn", LR: 0.01, MOMENTUM: 0.9, DECAY: 5e-4, "data.batch_size": 32}
XRAY_FILES = ("fashion_mnist.yaml", "scenarios/shapfed_chest_xray.yaml")
GPU: Overrides = {"trainer.accelerator": "auto"}
PLAIN: Overrides = {LR: 0.01, MOMENTUM: 0.0, "data.batch_size": 64}  # "SGD with a fixed learning rate of 0.01"
RESNET: Overrides = {
    **GPU,
    **PLAIN,
    NETWORK: "resnet34_small",
    ROUNDS: 50,
    SAMPLES: None,
    "trainer.limit_test_batches": 1.0,
}
SMALL: Overrides = {LR: 0.02, "data.batch_size": 32, "data.loader.eval_batch_size": 500}
FASHION: Overrides = {**SMALL, ROUNDS: 20, SAMPLES: 4000}
CIFAR: Overrides = {
    **SMALL,
    NETWORK: "shapfed_cnn",
    ROUNDS: 10,
    SAMPLES: 3000,
    "data.source": "cifar10",
    "trainer.limit_test_batches": 4,  # 2,000 of the 10,000 test images
}


def _scenario(name: str) -> Files:
    return ("fashion_mnist.yaml", f"scenarios/shapfed_{name}.yaml")


FIGURES = {
    "figure 3": SYNTHETIC,
    "figure 5": Experiment(
        XRAY_FILES,
        {**XRAYS, ROUNDS: 30, "data.partitioner.init_args.of": "client"},
        {**GPU, NETWORK: "resnet34_small", ROUNDS: 50, "data.batch_size": 64},
    ),
}
TABLES = {
    "PneumoniaMNIST, heterogeneous": Experiment(
        XRAY_FILES, {**XRAYS, ROUNDS: 15}, {**GPU, ROUNDS: 50, "data.batch_size": 64}, rows={"CGSV": {SCALE: 0.5}}
    ),
    "Fashion-MNIST, imbalanced": Experiment(_scenario("imbalanced"), FASHION, RESNET),
    "Fashion-MNIST, heterogeneous": Experiment(_scenario("heterogeneous"), FASHION, RESNET),
    "CIFAR-10, imbalanced": Experiment(_scenario("imbalanced"), CIFAR, RESNET, every=2),
    "CIFAR-10, heterogeneous": Experiment(_scenario("heterogeneous"), CIFAR, RESNET),
    "HAM10000, made-up clinics": Experiment(
        _scenario("ham10000"),
        {**SMALL, ROUNDS: 15},
        {**GPU, **PLAIN, NETWORK: "timm:efficientnet_b0", ROUNDS: 200},
        every=3,
    ),
}


def short(cell: Cell) -> Overrides:
    """Beside one round: enough images for every client to have one, for EfficientNet's batch statistics two."""
    images = 300 if cell.column.startswith("HAM10000") else 100
    return {SAMPLES: images, "data.loader.eval_batch_size": 16, "trainer.limit_test_batches": 1}


def cells(full: bool, seeds: Sequence[int]) -> list[Cell]:
    """Those of all figures and tables, seed by seed, so that a table that is stopped has whole seeds."""
    made = []
    for seed, (name, experiment) in product(seeds, reversed({**FIGURES, **TABLES}.items())):
        files, overrides = experiment.files, dict(experiment.overrides)
        if full:
            files, overrides = experiment.full_files or files, {**overrides, **experiment.full}
        if name in VALUES:
            algorithm, own = ROWS["FedAvg"]
            further = {**overrides, **own, "federation.metrics": VALUES[name]}
            made.append(Cell("values", name, seed, (*files, *algorithm), further, "shapfed_federation:values"))
            continue
        measure = f"shapfed_federation:{'on_the_way' if experiment.every else 'at_the_end'}"
        for row, (algorithm, own) in ROWS.items():
            further = {**overrides, **own, **experiment.rows.get(row, {})}
            made.append(Cell(row, name, seed, (*files, *algorithm), further, measure))
    return made


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
    return _tested(cell, root, every=TABLES[cell.column].every)


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
