"""The cases of ``costs.py``: federations of images, rows and texts that are drawn at random."""

from __future__ import annotations

import copy
import logging
import shutil
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import cost_networks
import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from flsv import FederatedDataModule, FederatedLoop, Reporting
from flsv.cli import main as flsv_command
from flsv.contrib import InRunShapley, InRunValues
from flsv.data import IIDPartitioner, Splits
from flsv.metrics import ClassSpecificShapley, CumulativeShapley, ShadowShapley
from flsv.models import MLP, LeNet5, build_network
from flsv.retraining.price import PriceList
from flsv.sampling import UniformSampler

VOCABULARY = 20_000
WORDS_PER_TEXT = 40
#: No table, no figures, no files: what a fit prints and writes is not measured, unless a case is about it.
QUIET = Reporting(table=False, figures=0, files=False)
Programs = dict[str, Callable[[], Any]]


class Classifier(L.LightningModule):
    """A network that is trained by its cross-entropy."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor) -> Tensor:
        return self.network(x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return nn.functional.cross_entropy(self.network(x), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05)


@dataclass(frozen=True)
class Setting:
    """A federation: its network, the shape of an input (None: texts), clients and their samples, rounds."""

    network: Callable[[], nn.Module]
    input_shape: tuple[int, ...] | None
    num_classes: int
    num_clients: int
    samples_of_client: int
    num_rounds: int
    num_validated: int = 0
    batch_size: int = 32

    def samples(self, count: int, seed: int = 0) -> TensorDataset:
        """Return samples around a center for each class, or random texts."""
        generator = torch.Generator().manual_seed(seed)
        labels = torch.randint(self.num_classes, (count,), generator=generator)
        if self.input_shape is None:
            shape = (count, WORDS_PER_TEXT)
            return TensorDataset(torch.randint(VOCABULARY, shape, generator=generator), labels)
        generator_of_centers = torch.Generator().manual_seed(9)
        centers = torch.randn(self.num_classes, *self.input_shape, generator=generator_of_centers)
        noise = torch.randn(count, *self.input_shape, generator=generator)
        return TensorDataset(centers[labels] + 2 * noise, labels)

    def training_samples(self) -> TensorDataset:
        return self.samples(self.num_clients * self.samples_of_client)

    def samples_on(self, accelerator: str) -> tuple[Tensor, ...]:
        """Return the inputs and labels of all clients on the device of an accelerator."""
        device = "cuda" if accelerator in ("gpu", "cuda") else "cpu"
        return tuple(tensor.to(device) for tensor in self.training_samples().tensors)

    def module(self) -> L.LightningModule:
        torch.manual_seed(0)
        return Classifier(self.network())

    def data(self) -> FederatedDataModule:
        validated = self.samples(self.num_validated, seed=1) if self.num_validated else None
        return FederatedDataModule(
            self.training_samples(),
            IIDPartitioner(self.num_clients),
            val=validated,
            batch_size=self.batch_size,
            splits=Splits(server_val=0.0),
        )


def lenet() -> nn.Module:
    return LeNet5(num_classes=10, input_shape=(1, 28, 28), channels=(10, 20), hidden=(50,))


def small_cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64, 10),
    )


def mlp(*widths: int, features: int = 784, classes: int = 10) -> nn.Module:
    return MLP(num_classes=classes, input_shape=(features,), hidden=widths)


def text_classifier() -> nn.Module:
    return nn.Sequential(nn.EmbeddingBag(VOCABULARY, 64), nn.Linear(64, 4))


def resnet18() -> nn.Module:
    return build_network("resnet18", 10, (3, 32, 32))


IMAGE = (1, 28, 28)
LENET = Setting(lenet, IMAGE, 10, num_clients=10, samples_of_client=600, num_rounds=5)
ROUND_SETTINGS = {
    "lenet": LENET,
    "mlp": Setting(partial(mlp, 200, 200), (784,), 10, 10, 600, 5),
    "softmax100": Setting(mlp, (784,), 10, 100, 600, 5),
    "mlp50": Setting(partial(mlp, 64), (784,), 10, 50, 600, 5),
    "lenet100": Setting(lenet, IMAGE, 10, 100, 60, 4),
    "resnet18": Setting(resnet18, (3, 32, 32), 10, 4, 64, 5),
}
#: In which people begin.
ORDINARY_SETTINGS = {
    "linear8": Setting(partial(mlp, features=20, classes=3), (20,), 3, 8, 100, 20, 300),
    "mlp20": Setting(partial(mlp, 64, features=30, classes=2), (30,), 2, 20, 100, 10, 500),
    "text50": Setting(text_classifier, None, 4, 50, 40, 4, 500),
    "lenet10": Setting(lenet, IMAGE, 10, 10, 200, 10, 1_000),
    "linear100": Setting(partial(mlp, features=20, classes=3), (20,), 3, 100, 10, 2, 500),
    "validation200k": Setting(partial(mlp, features=20, classes=3), (20,), 3, 8, 100, 4, 200_000),
}
COALITION_SETTINGS = {
    "lenet8": Setting(lenet, IMAGE, 10, 7, 230, 8, 180, batch_size=16),
    "lenet40": Setting(lenet, IMAGE, 10, 7, 230, 40, 180, batch_size=16),
    "resnet18": Setting(resnet18, (3, 32, 32), 10, 7, 270, 2, 210),
}


#: Federations whose coalitions all train at once. Images have 8 x 8 pixels.
AT_ONCE_SETTINGS = {
    "mlp5": Setting(partial(mlp, 64, features=64, classes=10), (64,), 10, 5, 216, 8, 450, 16),
    "mlp8": Setting(partial(mlp, 64, features=64, classes=10), (64,), 10, 8, 135, 8, 450, 16),
    "linear8": Setting(partial(mlp, features=64, classes=10), (64,), 10, 8, 135, 20, 450, 16),
    "cnn5": Setting(small_cnn, (1, 8, 8), 10, 5, 216, 8, 450, 16),
}


#: Models of four million numbers, of whose coalitions only two train in one fit.
LARGE = Setting(partial(mlp, 2048, 1820, features=64, classes=10), (64,), 10, 6, 64, 2, 100, 16)


def be_quiet() -> None:
    """For a process that measures: one thread, and no word of Lightning's."""
    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)
    warnings.filterwarnings("ignore")


class RoundTimer(L.Callback):
    """Processor and clock seconds of each round."""

    only_watches = True

    def on_train_start(self, *arguments: Any) -> None:
        self.seconds: list[tuple[float, float]] = []
        self._start = _now()

    def on_train_epoch_end(self, *arguments: Any) -> None:
        self.end_round()

    def end_round(self) -> None:
        """Count a round, and begin the next one."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        now = _now()
        self.seconds.append((now[0] - self._start[0], now[1] - self._start[1]))
        self._start = now

    def numbers(self) -> dict[str, float]:
        """Return the medians of the rounds, without the first one, which warms up."""
        processor, clock = map(statistics.median, zip(*self.seconds[1:]))
        numbers = {"round_processor_s": processor, "round_s": clock}
        if torch.cuda.is_available():
            numbers["device_memory_gib"] = torch.cuda.max_memory_allocated() / 2**30
        return numbers


def _now() -> tuple[float, float]:
    return time.process_time(), time.perf_counter()


def trainer_of(
    setting: Setting,
    callbacks: list[L.Callback],
    accelerator: str,
    **options: Any,
) -> L.Trainer:
    """Return a trainer that neither prints nor saves, unless options say so."""
    chosen = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
        "devices": 1,
        **options,
    }
    rounds = setting.num_rounds
    return L.Trainer(max_epochs=rounds, accelerator=accelerator, callbacks=callbacks, **chosen)


def fit(
    setting: Setting,
    metrics: Callable[[], Any] | None = None,
    accelerator: str = "cpu",
    trainer: dict[str, Any] | None = None,
    **options: Any,
) -> dict[str, float]:
    """Fit a federation, with the metric of ``metrics()`` if there is one; further options are the loop's."""
    measured = {"value": metrics()} if metrics is not None else {}
    loop = FederatedLoop(metrics=measured, **{"seed": 0, "reporting": QUIET, **options})
    timer = RoundTimer()
    options_of_trainer = trainer or {}
    trainer_of(setting, [loop, timer], accelerator, **options_of_trainer).fit(
        setting.module(), setting.data()
    )
    return timer.numbers()


def fit_plainly(setting: Setting, accelerator: str = "cpu") -> dict[str, float]:
    """Federated averaging on tensors that are there, and nothing else."""
    x, y = setting.samples_on(accelerator)
    clients = torch.arange(len(x)).split(setting.samples_of_client)
    server = setting.network().to(x.device)
    timer = RoundTimer()
    timer.on_train_start()
    for _ in range(setting.num_rounds):
        total: dict[str, Tensor] = {}
        for client in clients:
            model = copy.deepcopy(server)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
            for rows in client[torch.randperm(len(client))].to(x.device).split(setting.batch_size):
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
                optimizer.step()
            for name, value in model.state_dict().items():
                total[name] = total.get(name, 0) + value / len(clients)
        server.load_state_dict(total)
        timer.end_round()
    return timer.numbers()


def fit_by_trainer(setting: Setting, accelerator: str = "cpu") -> dict[str, float]:
    """Lightning's Trainer on batches of the same sizes, as one model's epochs."""
    x, y = setting.samples_on(accelerator)
    batches = list(zip(x.split(setting.batch_size), y.split(setting.batch_size)))
    timer = RoundTimer()
    trainer_of(setting, [timer], accelerator).fit(
        setting.module(), DataLoader(batches, batch_size=None)
    )
    return timer.numbers()


def retrain_quickstart(retrain: bool) -> None:
    """Fit the quickstart, and retrain its coalitions with three seeds."""
    flsv_command(["fit", "--config", "quickstart", "--trainer.default_root_dir=."])
    if retrain:
        flsv_command(["retrain", "lightning_logs/version_0", "--seeds", "3"])
    shutil.rmtree("lightning_logs")


def many_clients(num_clients: int, accelerator: str) -> dict[str, float]:
    """Draw ten of many clients in each round, and write TensorBoard, CSV files and checkpoints."""
    setting = Setting(
        partial(mlp, 32, features=64), (64,), 10, num_clients, 20, 6, 1_000, batch_size=10
    )
    files = {"logger": True, "enable_checkpointing": True}
    numbers = fit(
        setting,
        ClassSpecificShapley,
        accelerator,
        trainer=files,
        sampler=UniformSampler(10),
        reporting=Reporting(table=False),
    )
    size = sum(file.stat().st_size for file in Path().rglob("*") if file.is_file())
    return {**numbers, "folder_mib": size / 2**20}


def fit_at_once(setting: Setting, accelerator: str) -> dict[str, float]:
    """Train all coalitions at once, although this is dearer than one by one."""
    PriceList.at_once = lambda prices, masks: 0.0  # type: ignore[method-assign]
    return fit(setting, partial(ShadowShapley, coalitions="all"), accelerator)


def cases(accelerator: str = "cpu") -> dict[str, Programs]:
    """Return the programs of each case by name; the others are compared with the first."""
    run = partial(partial, fit, accelerator=accelerator)
    programs: dict[str, Programs] = {}

    files = {"logger": True}
    comfort = {**files, "enable_checkpointing": True, "enable_progress_bar": True}
    written = {"metrics": ClassSpecificShapley, "reporting": Reporting(table=False, figures=0)}
    for name, setting in ROUND_SETTINGS.items():
        programs[f"round/{name}"] = {
            "plain PyTorch": partial(fit_plainly, setting, accelerator),
            "Lightning's Trainer": partial(fit_by_trainer, setting, accelerator),
            "FederatedLoop": run(setting),
            "+ CSSV, TensorBoard, CSV": run(setting, trainer=files, **written),
            "+ progress bar, checkpoints": run(setting, trainer=comfort, **written),
            "vmap": run(setting, engine="vmap"),
            "two ranks": run(setting, trainer={"strategy": "federated", "devices": 2}),
        }

    validated_lenet = replace(LENET, num_validated=400)
    programs["in-run"] = {"without": run(validated_lenet)}
    for every in (1, 2, 4, 8):
        algorithm = InRunValues(every)
        with_values = run(validated_lenet, InRunShapley, client_algorithm=algorithm)
        programs["in-run"][f"every={every}"] = with_values

    for name, setting in ORDINARY_SETTINGS.items():
        programs[f"ordinary/{name}"] = {
            "alone": run(setting),
            "ShadowShapley()": run(setting, ShadowShapley),
        }
    for name, setting in COALITION_SETTINGS.items():
        case = programs[f"coalitions/{name}"] = {"alone": run(setting)}
        for coalitions in ("singles", "halves", "both", "all"):
            case[coalitions] = run(setting, partial(ShadowShapley, coalitions=coalitions))
        case["CumulativeShapley()"] = run(setting, CumulativeShapley)
    for name, setting in AT_ONCE_SETTINGS.items():
        programs[f"at-once/{name}"] = {
            "alone": run(setting),
            "each client alone": run(setting, partial(ShadowShapley, coalitions="singles")),
            "all coalitions": run(setting, partial(ShadowShapley, coalitions="all")),
        }
    programs["at-once/large6"] = {
        "alone": run(LARGE),
        "one by one": run(LARGE, partial(ShadowShapley, coalitions="all")),
        "at once": partial(fit_at_once, LARGE, accelerator),
    }
    programs["coalitions/retrain"] = {
        "the quickstart": partial(retrain_quickstart, False),
        "and its retraining by three seeds": partial(retrain_quickstart, True),
    }

    sizes = (10, 100, 1_000, 10_000)
    programs["clients"] = {f"{size:,}": partial(many_clients, size, accelerator) for size in sizes}
    for num_sites in (2, 3, 5, 10):
        programs[f"networks/{num_sites}"] = {
            name: partial(cost_networks.run, network, num_sites)
            for name, network in cost_networks.NETWORKS.items()
        }
    return programs
