"""What ShadowShapley costs, in fits of the federation: processor time and elapsed time with and without the metric.

    python tools/bench_fits.py [--networks mlp lenet resnet18] [--clients 5 7] [--cores 1 2] [--repeats 3]
    python tools/bench_fits.py --networks lenet --clients 7 --rounds 40
    python tools/bench_fits.py --options both all

Each fit runs in a fresh process with one torch thread, on one or two cores: FedAvg with SGD, 8 rounds on scikit-learn's
digits (the MLP of the quickstart, LeNet5 in 28x28), 2 rounds on 2,100 images of CIFAR-10 (``resnet18`` of timm, from
``$FLSV_DATA_ROOT``). The least of some repetitions counts. Processor seconds are those of the process and its children.
Another version is measured by ``PYTHONPATH=CHECKOUT python tools/bench_fits.py``.
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
from functools import partial
from itertools import product
from typing import Any

OPTIONS: dict[str, dict[str, Any] | None] = {
    "none": None,
    "default": {},
    "both": {"coalitions": "both"},
    "all": {"coalitions": "all"},
}


def federation(network: str, clients: int) -> tuple[Any, Any, int]:
    """Return a module, a data module and a number of rounds."""
    import torch

    from flsv import ClassifierClient, FederatedDataModule
    from flsv.data import DirichletPartitioner, Files, IIDPartitioner, Splits

    sgd = partial(torch.optim.SGD, lr=0.1)
    if network == "resnet18":
        splits = Splits(server_val=0.1, max_samples=2_100)
        files = Files(root=os.environ["FLSV_DATA_ROOT"])
        data = FederatedDataModule(
            "cifar10", IIDPartitioner(clients), batch_size=32, splits=splits, files=files
        )
        return ClassifierClient("resnet18", optimizer=partial(torch.optim.SGD, lr=0.05)), data, 2
    deal = DirichletPartitioner(num_clients=clients, alpha=0.5, min_samples=40, seed=1)
    if network == "mlp":
        data = FederatedDataModule("digits", deal, batch_size=16, splits=Splits(server_val=0.1))
        return ClassifierClient("mlp", network_args={"hidden": [64]}, optimizer=sgd), data, 8
    from sklearn.datasets import load_digits
    from torch.nn.functional import interpolate
    from torch.utils.data import TensorDataset

    x, y = load_digits(return_X_y=True)
    images = interpolate(torch.tensor(x, dtype=torch.float32).view(-1, 1, 8, 8) / 16, size=28)
    data = FederatedDataModule(
        TensorDataset(images, torch.tensor(y)), deal, batch_size=16, splits=Splits(server_val=0.1)
    )
    return ClassifierClient("lenet5", optimizer=sgd), data, 8


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
        metrics=metrics, seed=0, reporting=Reporting(table=False, figures=0, files=False)
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

        processor_at_start = processor_seconds()
        time_at_start = time.monotonic()
        trainer.fit(module, data)
        elapsed = time.monotonic() - time_at_start
        processor = processor_seconds() - processor_at_start
    if metrics:
        assert not loop.contributions["value"].isnan().any()
    print(json.dumps({"processor": processor, "elapsed": elapsed}))


def processor_seconds() -> float:
    """Return the processor seconds of this process and of its children that have ended."""
    seconds = 0.0
    for processes in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN):
        usage = resource.getrusage(processes)
        seconds += usage.ru_utime + usage.ru_stime
    return seconds


def measured(repeats: int, *case: Any) -> dict[str, float]:
    """Return the least seconds of some fits, each in a fresh process."""
    command = [sys.executable, __file__, "--case", *map(str, case)]
    smallest = {"processor": math.inf, "elapsed": math.inf}
    for _ in range(repeats):
        completed = subprocess.run(command, check=True, capture_output=True)
        seconds = json.loads(completed.stdout)
        for name in smallest:
            smallest[name] = min(smallest[name], seconds[name])
    return smallest


def main() -> None:
    """Print a table: a line for each network, number of clients, option and number of cores."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    choices = [name for name in OPTIONS if name != "none"]
    case_names = ("ROUNDS", "OPTION", "NETWORK", "CLIENTS", "CORES")
    several = partial(parser.add_argument, nargs="+")
    several("--networks", default=["mlp", "lenet", "resnet18"])
    several("--clients", type=int, default=[5, 7])
    several("--options", default=["default"], choices=choices)
    several("--cores", type=int, default=[1, 2])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=0, help="0: 8, and 2 of resnet18")
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


if __name__ == "__main__":
    main()
