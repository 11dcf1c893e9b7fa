"""What values cost in six settings in which people begin: the case ``ordinary`` of ``bench_fits.py``.

    python tools/bench_fits.py ordinary --repeats 3 --against OTHER_CHECKOUT

Each fit is a process of its own. A row has the processor seconds of the fit, without imports, and with
``ShadowShapley()``, the ratio, and of the seconds with values those of the coalitions, the repetition of the run's
first rounds, the estimates of values, and the values on each validation sample. The least of some repetitions in
turns counts.
"""

from __future__ import annotations

import json
import logging
import os
import resource
import subprocess
import sys
import time
import warnings
from collections import Counter
from collections.abc import Sequence
from functools import partial, wraps
from typing import Any, NamedTuple

import lightning as L
import torch
from torch import nn
from torch.utils.data import TensorDataset

from flsv import FederatedDataModule, FederatedLoop
from flsv.core import Values
from flsv.data import IIDPartitioner
from flsv.metrics import ShadowShapley, shadow
from flsv.retraining.after_the_run import TrainingAfterTheRun

VOCABULARY = 20_000
WORDS_PER_TEXT = 40
#: Parts of a fit with values, and the functions whose seconds they are.
PARTS: dict[str, tuple[Any, str]] = {
    "coalitions": (TrainingAfterTheRun, "_train_missing"),
    "repetition": (TrainingAfterTheRun, "_compare_with_run"),
    "estimates": (shadow, "values_by_round"),
    "by_sample": (Values, "record"),
}


class Setting(NamedTuple):
    """A federation: the shape of an input (None: texts), numbers of classes, samples, clients and rounds."""

    input_shape: Sequence[int] | None
    num_classes: int
    num_samples: int
    num_validated: int
    num_clients: int
    num_rounds: int


SETTINGS = {
    "linear8": Setting((20,), 3, 800, 300, 8, 20),
    "mlp20": Setting((30,), 2, 2_000, 500, 20, 10),
    "text50": Setting(None, 4, 2_000, 500, 50, 4),
    "lenet10": Setting((1, 28, 28), 10, 2_000, 1_000, 10, 10),
    "linear100": Setting((20,), 3, 1_000, 500, 100, 2),
    "validation200k": Setting((20,), 3, 800, 200_000, 8, 4),
}


class Classifier(L.LightningModule):
    """A network that is trained by its cross-entropy."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.network(x)

    def training_step(
        self,
        batch: Sequence[torch.Tensor],
        batch_idx: int,
    ) -> torch.Tensor:
        x, y = batch
        return nn.functional.cross_entropy(self.network(x), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05)


def make_network(name: str) -> nn.Module:
    """Return the network of a setting."""
    if name == "mlp20":
        return nn.Sequential(
            nn.Linear(30, 64),
            nn.ReLU(),
            nn.Linear(64, 2),
        )
    if name == "text50":
        return nn.Sequential(
            nn.EmbeddingBag(VOCABULARY, 64),
            nn.Linear(64, 4),
        )
    if name == "lenet10":
        return make_lenet()
    return nn.Linear(20, 3)


def make_lenet() -> nn.Module:
    """Return a small network of convolutions for images of 28 x 28 pixels."""
    return nn.Sequential(
        nn.Conv2d(1, 6, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(400, 120),
        nn.ReLU(),
        nn.Linear(120, 84),
        nn.ReLU(),
        nn.Linear(84, 10),
    )


def make_samples(
    setting: Setting,
    count: int,
    generator: torch.Generator,
) -> TensorDataset:
    """Return ``count`` samples around a center for each class, or random texts."""
    labels = torch.randint(setting.num_classes, (count,), generator=generator)
    if setting.input_shape is None:
        words = torch.randint(VOCABULARY, (count, WORDS_PER_TEXT), generator=generator)
        return TensorDataset(words, labels)
    generator_of_centers = torch.Generator().manual_seed(1)
    shape = (setting.num_classes, *setting.input_shape)
    centers = torch.randn(shape, generator=generator_of_centers)
    noise = torch.randn(count, *setting.input_shape, generator=generator)
    return TensorDataset(centers[labels] + 2 * noise, labels)


def make_federation(name: str) -> tuple[L.LightningModule, FederatedDataModule, int]:
    """Return a setting's module, data module and number of rounds."""
    setting = SETTINGS[name]
    generator = torch.Generator().manual_seed(0)
    samples = partial(make_samples, setting, generator=generator)
    data = FederatedDataModule(
        samples(setting.num_samples),
        IIDPartitioner(setting.num_clients),
        val=samples(setting.num_validated),
        batch_size=32,
    )
    torch.manual_seed(0)
    return Classifier(make_network(name)), data, setting.num_rounds


def time_function(
    owner: Any,
    name: str,
    part: str,
    seconds: Counter[str],
) -> None:
    """Let the processor seconds of a function count for a part from now on, if the checkout has this function."""
    function = getattr(owner, name, None)
    if function is None:
        return

    @wraps(function)
    def timed(*args: Any, **kwargs: Any) -> Any:
        start_seconds = time.process_time()
        try:
            return function(*args, **kwargs)
        finally:
            seconds[part] += time.process_time() - start_seconds

    setattr(owner, name, timed)


def processor_seconds() -> float:
    """Return the processor seconds of this process and its children."""
    total = 0.0
    for processes in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN):
        usage = resource.getrusage(processes)
        total += usage.ru_utime + usage.ru_stime
    return total


def measure(name: str, has_values: bool) -> dict[str, float]:
    """Fit a setting in this process, and return its processor seconds, of all and of each part."""
    seconds: Counter[str] = Counter()
    for part, (owner, function) in PARTS.items():
        time_function(owner, function, part, seconds)
    module, data, num_rounds = make_federation(name)
    metrics: dict[str, Any] = {}
    if has_values:
        metrics["value"] = ShadowShapley()
    trainer = L.Trainer(
        max_epochs=num_rounds,
        callbacks=[FederatedLoop(metrics=metrics, seed=0)],
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    seconds_before = processor_seconds()
    trainer.fit(module, data)
    return {"all": processor_seconds() - seconds_before, **seconds}


def measure_in_process(
    name: str,
    work: str,
    checkout: str,
) -> dict[str, float]:
    """Measure a setting in a process of its own, ``alone`` or with ``values``, with the code of a checkout."""
    result = subprocess.run(
        [sys.executable, __file__, name, work],
        env={**os.environ, "PYTHONPATH": checkout},
        check=True,
        capture_output=True,
        text=True,
    )
    *_, line = result.stdout.splitlines()
    seconds: dict[str, float] = json.loads(line)
    return seconds


def print_table(
    checkouts: Sequence[str],
    repeats: int,
) -> None:
    """Print a row for each setting and checkout."""
    print("setting", "fit_s", "with_values_s", "times", *PARTS, "checkout", sep=",")
    for name in SETTINGS:
        trials: dict[tuple[str, str], list[dict[str, float]]] = {}
        for _ in range(repeats):
            for checkout in checkouts:
                for work in ("alone", "values"):
                    seconds = measure_in_process(name, work, checkout)
                    trials.setdefault((checkout, work), []).append(seconds)
        for checkout in checkouts:
            alone = _least(trials[checkout, "alone"])
            valued = _least(trials[checkout, "values"])
            numbers = [alone["all"], valued["all"], valued["all"] / alone["all"]]
            numbers += [valued.get(part, 0.0) for part in PARTS]
            columns = [f"{number:.2f}" for number in numbers]
            print(name, *columns, checkout, sep=",", flush=True)


def _least(trials: Sequence[dict[str, float]]) -> dict[str, float]:
    return min(trials, key=lambda seconds: seconds["all"])


if __name__ == "__main__":
    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    _, setting_name, fit_kind = sys.argv
    print(json.dumps(measure(setting_name, has_values=fit_kind == "values")))
