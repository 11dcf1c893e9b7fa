"""What ShadowShapley and ``flsv retrain`` cost, in fits of the federation: ratios of processor time in one process.

    python tools/bench_fits.py
    python tools/bench_fits.py lenet-8 retrain --repeats 5
    python tools/bench_fits.py lenet-8 --values singles halves both all
    python tools/bench_fits.py tiny-3 large-2 --values singles cumulative --repeats 5 --against OTHER_CHECKOUT
    python tools/bench_fits.py memory outputs --against OTHER_CHECKOUT
    python tools/bench_fits.py ordinary --against OTHER_CHECKOUT

Seven clients train by FedAvg: LeNet5 on scikit-learn's digits in 28x28, and ``resnet18`` of timm on 2,100 images of
CIFAR-10 (from ``$FLSV_DATA_ROOT``). ``tiny`` is an MLP and three clients of 30 samples, ``large`` five clients of 63 MB
in memory each. A row has the seconds of the fit without the metric, and how many of these the fit with it takes, in all
and by part: the copy, the coalitions, scoring, its forward passes, and the twin. ``retrain`` is ``flsv retrain RUN
--seeds 3`` of the quickstart, over the quickstart. ``memory`` is the peak memory of a round of ten clients in models of
50 MB, ``outputs`` that of scoring a model in all its outputs, of 40,000 samples and 5,000 classes; without another
checkout, name one of these two alone. ``ordinary`` is the six settings of ``bench_ordinary.py``, with other columns.
One torch thread. The least of some repetitions in turns counts, after one that
does not. Another checkout is measured in turns with this one, each repetition in a new process. What lies beside the
folder for temporary files counts for a coalition: let ``$TMPDIR`` be one with few neighbours.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import redirect_stdout
from functools import partial, wraps
from pathlib import Path
from typing import Any

import bench_ordinary
import lightning as L
import torch
from sklearn.datasets import load_digits
from torch.nn.functional import interpolate
from torch.utils.data import TensorDataset

from flsv import ClassifierClient, FederatedDataModule, FederatedLoop, Reporting
from flsv.cli import main as flsv_command
from flsv.core.parameter_space import ParameterSpace
from flsv.data import DirichletPartitioner, Files, IIDPartitioner, Splits
from flsv.games import ModelEvaluator, ValidatedModels, model_evaluator
from flsv.metrics import CumulativeShapley, LeaveOneOut, ShadowShapley
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
    "tiny-3": ("tiny", 3),
    "large-2": ("large", 2),
}
#: Cases that are measured only if they are named.
NAMED_ONLY = ("memory", "outputs", "ordinary")
PARTS = ("copy", "coalitions", "scoring", "forward", "twin")
#: Values by ``ShadowShapley(coalitions=)``, or by :class:`CumulativeShapley`.
VALUES = ("singles", "halves", "both", "all", "cumulative")
#: Entries of the weight matrix of the case ``memory``, and bytes of a model.
WIDTH = 3_536
MODEL_BYTES = 4 * WIDTH**2
#: Validation samples and classes of the case ``outputs``, and bytes of a model's outputs.
NUM_SAMPLES = 40_000
NUM_CLASSES = 5_000
OUTPUT_BYTES = 4 * NUM_SAMPLES * NUM_CLASSES


class PartTimer:
    """Timer of a fit's parts. What runs within another part counts for the inner one only."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()
        self._part = "run"
        self._time_at_begin = time.process_time()
        self._time(RunCopy, "__init__", "copy")
        self._time(CoalitionTraining, "train", "coalitions")
        self._time(TrainingAfterTheRun, "_difference_by_repetition", "twin")
        for evaluator in (ModelEvaluator, ValidatedModels):
            self._time(evaluator, "score_module", "scoring")
            self._time(evaluator, "evaluate", "scoring")
        # It had another name before 3.1.
        forward = "outputs_of" if hasattr(model_evaluator, "outputs_of") else "_outputs_of"
        self._time(model_evaluator, forward, "forward")

    def processor_seconds(self, work: Callable[[], Any]) -> Counter[str]:
        """Do some work, and return its processor seconds by part."""
        self._begin("run")
        self.seconds.clear()
        work()
        self._begin("run")
        return self.seconds.copy()

    def _time(self, owner: Any, name: str, part: str) -> None:
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
    if network in ("tiny", "large"):
        return federation_of_mlp(network)

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


def federation_of_mlp(size: str) -> tuple[L.LightningModule, FederatedDataModule]:
    """Return a small network, and clients with few samples or with many."""
    if size == "tiny":
        num_clients, num_samples, num_features, hidden, batch_size = 3, 30, 6, 8, 16
    else:
        num_clients, num_samples, num_features, hidden, batch_size = 5, 20_000, 784, 32, 256

    def samples(count: int) -> TensorDataset:
        features = torch.randn(count, num_features, generator=generator)
        return TensorDataset(features, features[:, :3].argmax(1))

    generator = torch.Generator().manual_seed(0)
    data = FederatedDataModule(
        clients={f"client {index}": samples(num_samples) for index in range(num_clients)},
        val=samples(60),
        batch_size=batch_size,
        splits=Splits(),
    )
    module = ClassifierClient(
        "mlp",
        network_args={"hidden": [hidden]},
        optimizer=partial(torch.optim.SGD, lr=0.1),
    )
    return module, data


class WideNet(L.LightningModule):
    """A module of one square matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        padding = (0, WIDTH - x.shape[1])
        padded = torch.nn.functional.pad(x, padding)
        return self.layer(padded)[:, :10]

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        return torch.nn.functional.cross_entropy(self(x), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def peak_models() -> float:
    """Fit ten clients for a round, score models without each of them, and return the memory in models that takes."""
    digits = load_digits()
    dataset = TensorDataset(
        torch.tensor(digits.data, dtype=torch.float32), torch.tensor(digits.target)
    )
    splits = Splits(server_val=0.1, max_samples=300)
    data = FederatedDataModule(dataset, IIDPartitioner(10), batch_size=32, splits=splits)
    initial_peak = peak_bytes()
    fit_in_folder(WideNet(), data, 1, {"value": LeaveOneOut()})
    return (peak_bytes() - initial_peak) / MODEL_BYTES


def peak_outputs() -> float:
    """Score a model, and return the memory in outputs of all samples that takes."""
    module = torch.nn.Linear(8, NUM_CLASSES)
    inputs = torch.randn(NUM_SAMPLES, 8)
    labels = torch.randint(NUM_CLASSES, (NUM_SAMPLES,))
    batches = zip(inputs.split(256), labels.split(256))
    initial_peak = peak_bytes()
    space = ParameterSpace(module)
    evaluator = ModelEvaluator(
        module,
        space,
        batches,
        num_classes=NUM_CLASSES,
    )
    evaluator(space.read(module)[None])
    return (peak_bytes() - initial_peak) / OUTPUT_BYTES


def peak_bytes() -> int:
    """Return the peak memory of this process."""
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def fit(
    network: str,
    rounds: int,
    values: str | None,
) -> None:
    """Fit a federation, with the metric of ``values`` if there are any."""
    module, data = federation(network)
    metrics: dict[str, Any] = {}
    if values == "cumulative":
        metrics["value"] = CumulativeShapley()
    elif values is not None:
        untyped_values: Any = values
        metrics["value"] = ShadowShapley(coalitions=untyped_values)
    fit_in_folder(module, data, rounds, metrics)


def fit_in_folder(
    module: L.LightningModule,
    data: FederatedDataModule,
    rounds: int,
    metrics: dict[str, Any],
) -> None:
    """Fit a federation with metrics, in a new folder."""
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


def seconds_here(
    timer: PartTimer,
    name: str,
    values: list[str],
    repeats: int,
) -> dict[str, Counter[str]]:
    """Return the least seconds of a case by part: ``alone``, and with each of ``values``."""
    if name == "memory":
        return {"alone": Counter(run=1.0), "models": Counter(run=peak_models())}
    if name == "outputs":
        return {"alone": Counter(run=1.0), "outputs": Counter(run=peak_outputs())}
    if name == "retrain":
        return seconds_of_retrain(timer, repeats)
    network, rounds = CASES[name]
    works = {"alone": partial(fit, network, rounds, None)}
    for value in values:
        works[value] = partial(fit, network, rounds, value)
    return measure(timer, works, repeats)


def seconds_of_checkouts(
    checkouts: list[str],
    name: str,
    values: list[str],
    repeats: int,
) -> dict[str, dict[str, Counter[str]]]:
    """Return the least seconds of a case by checkout, each repetition in a new process."""
    best_seconds: dict[str, dict[str, Counter[str]]] = {checkout: {} for checkout in checkouts}
    command = [
        sys.executable,
        __file__,
        name,
        "--values",
        *values,
        "--repeats",
        "1",
        "--as-json",
    ]
    for _ in range(repeats):
        for checkout in checkouts:
            with tempfile.TemporaryDirectory() as folder:
                result = subprocess.run(
                    command,
                    env={**os.environ, "PYTHONPATH": checkout},
                    cwd=folder,
                    check=True,
                    capture_output=True,
                    text=True,
                )
            best_of_checkout = best_seconds[checkout]
            *_, line = result.stdout.splitlines()
            for work, parts in json.loads(line).items():
                seconds = Counter(parts)
                if work not in best_of_checkout or seconds.total() < best_of_checkout[work].total():
                    best_of_checkout[work] = seconds
    return best_seconds


def checkouts_of(against: str | None) -> list[str]:
    """Return the folder of this checkout, and of the other one."""
    folders = [str(Path(__file__).parents[1])]
    if against:
        folders.append(str(Path(against).absolute()))
    return folders


def main() -> None:
    """Print a table: a row for each case."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    cases = [*CASES, "retrain", *NAMED_ONLY]
    parser.add_argument(
        "cases",
        nargs="*",
        metavar="CASE",
        default=[name for name in cases if name not in ("tiny-3", "large-2", *NAMED_ONLY)],
        help=f"of {cases}",
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--values", nargs="+", choices=VALUES, default=["singles"])
    parser.add_argument("--against", metavar="CHECKOUT", help="another checkout")
    parser.add_argument("--as-json", action="store_true", help="print seconds alone")
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")

    if options.cases == ["ordinary"]:
        bench_ordinary.print_table(checkouts_of(options.against), options.repeats)
        return
    timer = PartTimer()
    if not options.as_json:
        print("case,fit_s,times", *PARTS, sep=",")
    for name in options.cases:
        if options.against:
            seconds_by_checkout = seconds_of_checkouts(
                checkouts_of(options.against), name, options.values, options.repeats
            )
        else:
            best_seconds = seconds_here(timer, name, options.values, options.repeats)
            if options.as_json:
                print(json.dumps(best_seconds))
                continue
            seconds_by_checkout = {"": best_seconds}
        for checkout, best_seconds in seconds_by_checkout.items():
            for work in best_seconds.keys() - {"alone"}:
                print_row(
                    f"{name} {work} {checkout}".strip(), best_seconds["alone"], best_seconds[work]
                )


def seconds_of_retrain(timer: PartTimer, repeats: int) -> dict[str, Counter[str]]:
    """Return the seconds of ``flsv retrain``, without the repetitions that an earlier call has left."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "lightning_logs/version_0"

        def retrain() -> None:
            shutil.rmtree(run / "retrained", ignore_errors=True)
            run_command("retrain", str(run), "--seeds", "3")

        root = f"--trainer.default_root_dir={folder}"
        fit_quickstart = partial(run_command, "fit", "--config", "quickstart", root)
        return measure(timer, {"alone": fit_quickstart, "retrain": retrain}, repeats)


if __name__ == "__main__":
    main()
