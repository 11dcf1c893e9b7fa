"""What ShadowShapley costs, in fits of the federation: processor time and elapsed time with and without the metric.

    python tools/bench_fits.py [--networks mlp lenet transformer resnet18] [--clients 4 7 16] [--cores 1 2]
    python tools/bench_fits.py --networks lenet --clients 7 --rounds 40 --repeats 5
    python tools/bench_fits.py --networks lenet --clients 7 --parts
    python tools/bench_fits.py --options both all

Each fit runs in a fresh process with one torch thread, on one or two cores, which are the coalitions' jobs: FedAvg with
SGD, 8 rounds on scikit-learn's digits (the MLP of the quickstart, LeNet5 in 28x28) or on 1,800 texts of 48 random words
(a transformer of two layers), 2 rounds on 2,100 images of CIFAR-10 (``resnet18`` of timm, from ``$FLSV_DATA_ROOT``).
The least of some repetitions counts. Processor seconds are those of the process and its children.
Another version is measured by ``PYTHONPATH=CHECKOUT python tools/bench_fits.py``.

``--parts`` prints on what they are spent in the run without the metric, in the run with it, in the coalition of all
clients that is checked, and in all other coalitions. What is in no named part, such as the server's work, setup, forks
and hand-over, is "rest".
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from functools import partial, wraps
from itertools import product
from typing import Any

OPTIONS: dict[str, dict[str, Any] | None] = {
    "none": None,
    "default": {},
    "both": {"coalitions": "both"},
    "all": {"coalitions": "all"},
}
Method = Callable[..., Any]
#: Parts of a fit, in the order in which they are printed.
PARTS = ("training", "validation", "scoring", "prediction", "rest")
#: Columns of the table of parts.
PROCESSES = ("run alone", "run", "check", "coalitions")


def federation(network: str, clients: int) -> Any:
    """Return a module, a data module and a number of rounds."""
    import torch

    from flsv import ClassifierClient
    from flsv.data import DirichletPartitioner, IIDPartitioner

    sgd = partial(torch.optim.SGD, lr=0.1)
    evenly = IIDPartitioner(clients)
    by_class = DirichletPartitioner(
        clients,
        alpha=0.5,
        min_samples=40,
        seed=1,
    )
    if network == "resnet18":
        smaller_steps = partial(torch.optim.SGD, lr=0.05)
        module = ClassifierClient("resnet18", optimizer=smaller_steps)
        return module, pictures(evenly), 2
    if network == "transformer":
        small_steps = partial(torch.optim.SGD, lr=0.02)
        module = ClassifierClient(transformer(), optimizer=small_steps)
        return module, small_data(random_texts(), evenly), 8
    if network == "mlp":
        hidden = {"hidden": [64]}
        module = ClassifierClient("mlp", network_args=hidden, optimizer=sgd)
        return module, small_data("digits", by_class), 8
    module = ClassifierClient("lenet5", optimizer=sgd)
    return module, small_data(large_digits(), by_class), 8


def small_data(source: Any, partitioner: Any) -> Any:
    """Return a data module in which the server holds out a tenth."""
    from flsv import FederatedDataModule
    from flsv.data import Splits

    splits = Splits(server_val=0.1)
    return FederatedDataModule(source, partitioner, batch_size=16, splits=splits)


def pictures(partitioner: Any) -> Any:
    """Return a data module of 2,100 images of CIFAR-10."""
    from flsv import FederatedDataModule
    from flsv.data import Files, Splits

    splits = Splits(server_val=0.1, max_samples=2_100)
    files = Files(root=os.environ["FLSV_DATA_ROOT"])
    return FederatedDataModule(
        "cifar10",
        partitioner,
        batch_size=32,
        splits=splits,
        files=files,
    )


def large_digits() -> Any:
    """Return scikit-learn's digits in 28x28."""
    import torch
    from sklearn.datasets import load_digits
    from torch.nn.functional import interpolate
    from torch.utils.data import TensorDataset

    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32)
    large_images = interpolate(images[:, None] / 16, size=28)
    labels = torch.tensor(digits.target)
    return TensorDataset(large_images, labels)


def random_texts() -> Any:
    """Return texts of four subjects, as the numbers of their words, and the subjects."""
    import torch
    from torch.utils.data import TensorDataset

    generator = torch.Generator().manual_seed(0)
    subjects = torch.randint(4, [1_800], generator=generator)
    words = torch.randint(500, [1_800, 48], generator=generator)
    words_of_subject = words - words % 4 + subjects[:, None]
    is_of_subject = torch.rand(words.shape, generator=generator) < 0.1
    texts = torch.where(is_of_subject, words_of_subject, words)
    return TensorDataset(texts, subjects)


def transformer() -> Any:
    """Return a classifier of texts of 48 words out of 500."""
    from torch import nn

    class Words(nn.Embedding):
        def forward(self, words: Any) -> Any:
            return super().forward(words.long())

    layer = nn.TransformerEncoderLayer(
        64,
        nhead=4,
        dim_feedforward=128,
        batch_first=True,
    )
    return nn.Sequential(
        Words(500, 64),
        nn.TransformerEncoder(layer, num_layers=2),
        nn.Flatten(),
        nn.Linear(48 * 64, 4),
    )


class PartTimer:
    """Timer of the parts of a fit, in this process and in those of coalitions, which write their seconds to a pipe."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()
        self._is_in_a_part = False
        self._read_end, self._write_end = os.pipe()

    def time_methods(self) -> None:
        """Time the methods that do a part's work from now on."""
        from lightning.pytorch.loops.evaluation_loop import _EvaluationLoop

        from flsv._lightning.fit_loop import FederatedFitLoop
        from flsv.games import ModelEvaluator, ValidatedModels
        from flsv.retraining.after_the_run import TrainingAfterTheRun
        from flsv.utilities import supervisor

        self._time(FederatedFitLoop, "train_epoch", "training")
        self._time(_EvaluationLoop, "run", "validation")
        for evaluator in (ModelEvaluator, ValidatedModels):
            self._time(evaluator, "live", "scoring")
            self._time(evaluator, "evaluate", "scoring")
        self._time(TrainingAfterTheRun, "_complete", "prediction")

        program: Any = supervisor
        program._send = self._reporting(program._send)
        os.register_at_fork(after_in_child=self._begin_again)

    def _time(self, owner: type, name: str, part: str) -> None:
        method = getattr(owner, name)
        setattr(owner, name, self._timed(method, part))

    def _timed(self, method: Method, part: str) -> Method:
        @wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            if self._is_in_a_part:
                return method(*args, **kwargs)
            self._is_in_a_part = True
            time_at_start = time.process_time()
            try:
                return method(*args, **kwargs)
            finally:
                seconds = time.process_time() - time_at_start
                self.seconds[part] += seconds
                self._is_in_a_part = False

        return call

    def _begin_again(self) -> None:
        self.seconds.clear()
        self._is_in_a_part = False

    def _reporting(self, send: Method) -> Method:
        def send_and_report(message: Any) -> Any:
            _, result = message
            process = "check"
            if getattr(result, "utilities", None):
                process = "coalitions"
            seconds = self.parts(time.process_time())
            report = json.dumps({"process": process, "seconds": seconds})
            os.write(self._write_end, f"{report}\n".encode())
            return send(message)

        return send_and_report

    def parts(self, processor: float) -> dict[str, float]:
        """Return this process's seconds by part, of ``processor`` seconds in all."""
        named_seconds = sum(self.seconds.values())
        return {**self.seconds, "rest": processor - named_seconds}

    def parts_of_children(self) -> dict[str, Counter[str]]:
        """Return the seconds by part that children have reported, for the check and for coalitions."""
        os.close(self._write_end)
        seconds: dict[str, Counter[str]] = {}
        for process in ("check", "coalitions"):
            seconds[process] = Counter()
        with open(self._read_end) as reports:
            for line in reports:
                report = json.loads(line)
                seconds[report["process"]].update(report["seconds"])
        return seconds


def fit(rounds: str, option: str, network: str, clients: str, cores: str) -> None:
    """Fit in this process, and print its seconds as JSON."""
    import logging
    import warnings

    import lightning as L
    import torch

    from flsv import FederatedLoop, Reporting
    from flsv.metrics import ShadowShapley

    os.sched_setaffinity(0, range(int(cores)))
    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    module, data, default_rounds = federation(network, int(clients))
    chosen = OPTIONS[option]
    metrics = {} if chosen is None else {"value": ShadowShapley(**chosen)}
    loop = FederatedLoop(
        metrics=metrics,
        seed=0,
        reporting=Reporting(table=False, figures=0, files=False),
    )
    with tempfile.TemporaryDirectory() as folder:
        trainer = L.Trainer(
            max_epochs=int(rounds) or default_rounds,
            callbacks=[loop],
            accelerator="cpu",
            default_root_dir=folder,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        data.setup("fit")  # reading and dealing out is not what is measured
        timer = PartTimer()
        timer.time_methods()

        own_processor_at_start = time.process_time()
        processor_at_start = processor_seconds()
        time_at_start = time.monotonic()
        trainer.fit(module, data)
        elapsed = time.monotonic() - time_at_start
        processor = processor_seconds() - processor_at_start
        own_processor = time.process_time() - own_processor_at_start
    if metrics:
        assert not loop.contributions["value"].isnan().any()

    parts: dict[str, Any] = timer.parts_of_children()
    seconds_of_children = 0.0
    for seconds in parts.values():
        seconds_of_children += sum(seconds.values())
    forks_and_ends = processor - own_processor - seconds_of_children
    parts["coalitions"]["rest"] += forks_and_ends
    parts["run"] = timer.parts(own_processor)
    result = {"processor": processor, "elapsed": elapsed, "parts": parts}
    print(json.dumps(result))


def processor_seconds() -> float:
    """Return the processor seconds of this process and of its children that have ended."""
    seconds = 0.0
    for processes in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN):
        usage = resource.getrusage(processes)
        seconds += usage.ru_utime + usage.ru_stime
    return seconds


def measured(repeats: int, *case: Any) -> dict[str, Any]:
    """Return the least seconds of some fits, each in a fresh process, and the parts of the least processor time."""
    command = [sys.executable, __file__, "--case", *map(str, case)]
    smallest: dict[str, Any] = {"processor": math.inf, "elapsed": math.inf}
    for _ in range(repeats):
        completed = subprocess.run(command, check=True, capture_output=True)
        seconds = json.loads(completed.stdout)
        smallest["elapsed"] = min(smallest["elapsed"], seconds["elapsed"])
        if seconds["processor"] < smallest["processor"]:
            smallest["processor"] = seconds["processor"]
            smallest["parts"] = seconds["parts"]
    return smallest


def print_parts(alone: dict[str, Any], valued: dict[str, Any]) -> None:
    """Print a row for each part of a fit, with its processor seconds in each kind of process."""
    parts_of_processes = {**valued["parts"], "run alone": alone["parts"]["run"]}
    print("part", *PROCESSES, sep=",")
    for part in PARTS:
        row = [part]
        for process in PROCESSES:
            seconds = parts_of_processes[process].get(part, 0.0)
            row.append(f"{seconds:.2f}")
        print(*row, sep=",", flush=True)


def main() -> None:
    """Print a table: a line for each network, number of clients, option and number of cores."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    choices = [name for name in OPTIONS if name != "none"]
    case_names = ("ROUNDS", "OPTION", "NETWORK", "CLIENTS", "CORES")
    several = partial(parser.add_argument, nargs="+")
    several("--networks", default=["mlp", "lenet", "transformer", "resnet18"])
    several("--clients", type=int, default=[4, 7, 16])
    several("--options", default=["default"], choices=choices)
    several("--cores", type=int, default=[1, 2])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=0, help="0: 8, and 2 of resnet18")
    parser.add_argument("--parts", action="store_true", help="also print the parts of each case")
    parser.add_argument("--case", nargs=5, metavar=case_names, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case is not None:
        fit(*options.case)
        return

    print("network,clients,cores,coalitions,fit_s,with_s,processor_ratio,elapsed_ratio")
    measure = partial(measured, options.repeats, options.rounds)
    for case in product(options.networks, options.clients, options.cores):
        alone = measure("none", *case)
        for option in options.options:
            valued = measure(option, *case)
            numbers = [
                alone["processor"],
                valued["processor"],
                valued["processor"] / alone["processor"],
                valued["elapsed"] / alone["elapsed"],
            ]
            ratios = [f"{number:.2f}" for number in numbers]
            print(*case, option, *ratios, sep=",", flush=True)
            if options.parts:
                print_parts(alone, valued)


if __name__ == "__main__":
    main()
