"""What ShadowShapley and ``flsv retrain`` cost, in fits of the federation: ratios of processor time in one process.

    python tools/bench_fits.py
    python tools/bench_fits.py lenet-8 retrain --repeats 5
    python tools/bench_fits.py lenet-8 --coalitions singles halves both all

Seven clients train by FedAvg: LeNet5 on scikit-learn's digits in 28x28, and ``resnet18`` of timm on 2,100 images of
CIFAR-10 (from ``$FLSV_DATA_ROOT``). A row has the seconds of the fit without the metric, and how many of these the fit
with it takes, in all and by part: the copy, the coalitions, scoring, and the twin. ``retrain`` is ``flsv retrain RUN
--seeds 3`` of the quickstart, over the quickstart. One torch thread. The least of some repetitions in turns counts,
after one that does not. Another version is measured by ``PYTHONPATH=CHECKOUT python tools/bench_fits.py``.
"""

from __future__ import annotations

import argparse
import logging
import os
import shutil
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import redirect_stdout
from functools import partial, wraps
from pathlib import Path
from typing import Any

import lightning as L
import torch
from sklearn.datasets import load_digits
from torch.nn.functional import interpolate
from torch.utils.data import TensorDataset

from flsv import ClassifierClient, FederatedDataModule, FederatedLoop, Reporting
from flsv.cli import main as flsv_command
from flsv.data import DirichletPartitioner, Files, IIDPartitioner, Splits
from flsv.games import ModelEvaluator, ValidatedModels
from flsv.metrics import ShadowShapley
from flsv.retraining.after_the_run import TrainingAfterTheRun
from flsv.retraining.train_fits import CoalitionTraining
from flsv.utilities.run_copy import RunCopy

CLIENTS = 7
#: Rounds by case, and the network.
CASES = {
    "lenet-8": ("lenet", 8),
    "lenet-40": ("lenet", 40),
    "resnet18-2": ("resnet18", 2),
    "resnet18-6": ("resnet18", 6),
}
PARTS = ("copy", "coalitions", "scoring", "twin")
#: Values of ``ShadowShapley(coalitions=)``.
TRAININGS = ("singles", "halves", "both", "all")


class PartTimer:
    """Timer of a fit's parts. What runs within another part counts for the inner one only."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()
        self._part = "run"
        self._time_at_begin = time.process_time()
        self._time(RunCopy, "__init__", "copy")
        self._time(CoalitionTraining, "train", "coalitions")
        self._time(TrainingAfterTheRun, "_doubt_by_repetition", "twin")
        for evaluator in (ModelEvaluator, ValidatedModels):
            self._time(evaluator, "score_module", "scoring")
            self._time(evaluator, "evaluate", "scoring")

    def processor_seconds(self, work: Callable[[], Any]) -> Counter[str]:
        """Do some work, and return its processor seconds by part."""
        self._begin("run")
        self.seconds.clear()
        work()
        self._begin("run")
        return self.seconds.copy()

    def _time(self, owner: type, name: str, part: str) -> None:
        method = getattr(owner, name)

        @wraps(method)
        def timed(*args: Any, **kwargs: Any) -> Any:
            outer_part = self._part
            self._begin(part)
            try:
                return method(*args, **kwargs)
            finally:
                self._begin(outer_part)

        setattr(owner, name, timed)

    def _begin(self, part: str) -> None:
        now = time.process_time()
        self.seconds[self._part] += now - self._time_at_begin
        self._time_at_begin = now
        self._part = part


def federation(network: str) -> tuple[L.LightningModule, FederatedDataModule]:
    """Return a module and a data module in which the server holds out a tenth."""
    if network == "resnet18":
        optimizer = partial(torch.optim.SGD, lr=0.05)
        data = FederatedDataModule(
            "cifar10",
            IIDPartitioner(CLIENTS),
            batch_size=32,
            splits=Splits(server_val=0.1, max_samples=2_100),
            files=Files(root=os.environ["FLSV_DATA_ROOT"]),
        )
        return ClassifierClient("resnet18", optimizer=optimizer), data

    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32)
    large_images = interpolate(images[:, None] / 16, size=28)
    dataset = TensorDataset(large_images, torch.tensor(digits.target))
    by_class = DirichletPartitioner(
        CLIENTS,
        alpha=0.5,
        min_samples=40,
        seed=1,
    )
    splits = Splits(server_val=0.1)
    data = FederatedDataModule(dataset, by_class, batch_size=16, splits=splits)
    optimizer = partial(torch.optim.SGD, lr=0.1)
    return ClassifierClient("lenet5", optimizer=optimizer), data


def fit(
    network: str,
    rounds: int,
    coalitions: Any,
) -> None:
    """Fit a federation, with the metric if it has coalitions to train."""
    module, data = federation(network)
    metrics = {}
    if coalitions is not None:
        metrics["value"] = ShadowShapley(coalitions=coalitions)
    loop = FederatedLoop(
        metrics=metrics,
        seed=0,
        reporting=Reporting(table=False, figures=0, files=False),
    )
    with tempfile.TemporaryDirectory() as folder:
        trainer = L.Trainer(
            max_epochs=rounds,
            callbacks=[loop],
            accelerator="cpu",
            default_root_dir=folder,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(module, data)
    if metrics:
        assert not loop.contributions["value"].isnan().any()


def run_command(*words: str) -> None:
    """Run a command of flsv in this process."""
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
        assert flsv_command([*words]) == 0


def measure(
    timer: PartTimer,
    works: dict[str, Callable[[], Any]],
    repeats: int,
) -> dict[str, Counter[str]]:
    """Do works in turns. Return the parts of each one's least processor seconds."""
    best_seconds: dict[str, Counter[str]] = {}
    for repetition in range(repeats + 1):
        for name, work in works.items():
            seconds = timer.processor_seconds(work)
            is_best = name not in best_seconds or seconds.total() < best_seconds[name].total()
            if repetition == 1 or is_best:  # the first repetition only warms up
                best_seconds[name] = seconds
    return best_seconds


def print_row(name: str, alone: Counter[str], valued: Counter[str]) -> None:
    """Print a case's seconds alone, and its ratios to them."""
    numbers = [alone.total(), valued.total() / alone.total()]
    for part in PARTS:
        numbers.append(valued[part] / alone.total())
    columns = [f"{number:.2f}" for number in numbers]
    print(name, *columns, sep=",", flush=True)


def main() -> None:
    """Print a table: a row for each case."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    cases = [*CASES, "retrain"]
    parser.add_argument(
        "cases",
        nargs="*",
        metavar="CASE",
        default=cases,
        help=f"of {cases}",
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--coalitions", nargs="+", choices=TRAININGS, default=["singles"])
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")

    timer = PartTimer()
    print("case,fit_s,times", *PARTS, sep=",")
    for name in options.cases:
        if name == "retrain":
            print_retrain(timer, options.repeats)
            continue
        network, rounds = CASES[name]
        works = {"alone": partial(fit, network, rounds, None)}
        for coalitions in options.coalitions:
            works[coalitions] = partial(fit, network, rounds, coalitions)
        best_seconds = measure(timer, works, options.repeats)
        for coalitions in options.coalitions:
            print_row(f"{name} {coalitions}", best_seconds["alone"], best_seconds[coalitions])


def print_retrain(timer: PartTimer, repeats: int) -> None:
    """Print the row of ``flsv retrain``, without the repetitions that an earlier call has left."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "lightning_logs/version_0"

        def retrain() -> None:
            shutil.rmtree(run / "retrained", ignore_errors=True)
            run_command("retrain", str(run), "--seeds", "3")

        root = f"--trainer.default_root_dir={folder}"
        fit_quickstart = partial(run_command, "fit", "--config", "quickstart", root)
        best_seconds = measure(timer, {"alone": fit_quickstart, "retrain": retrain}, repeats)
    print_row("retrain", best_seconds["alone"], best_seconds["retrain"])


if __name__ == "__main__":
    main()
