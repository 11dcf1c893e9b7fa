"""A federation of very many clients in one process: what grows with their number, while the cohort stays the same.

    python tools/bench_clients.py [--clients 1000 10000 100000 1000000] [--cohort 10] [--rounds 5] [--logged]

Every client has two samples of four numbers and a linear model of ten parameters, so that training is next to nothing.
Every number of clients runs in a process of its own with one thread: CPU seconds until the first round begins (the data
are dealt out), the median CPU seconds of a round in the first and in the last third of the rounds but the first one, of
which how many after the last client has trained, the largest memory of the process, and the size of the last
checkpoint. Class-specific Shapley values are kept for all clients, ShapFed-WA weighs by them, and the server validates.
``--logged``: with TensorBoard and CSV files.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import lightning as L
import torch
from common import be_quiet, grid
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from torch import nn
from torch.utils.data import TensorDataset

from flsv import ClassifierClient, FederatedDataModule, FederatedLoop, Reporting
from flsv.aggregation import ShapFedWA
from flsv.data import IIDPartitioner, Splits
from flsv.metrics import ClassSpecificShapley
from flsv.sampling import UniformSampler

SAMPLES, NUMBERS, CLASSES = 2, 4, 2


class Clock(L.Callback):
    def __init__(self) -> None:
        self.begun = time.process_time()
        self.setup, self.rounds, self.after = 0.0, list[float](), list[float]()

    def on_train_epoch_start(self, *hook: Any) -> None:
        self.start = time.process_time()
        self.setup = self.setup or self.start - self.begun

    def on_train_batch_start(self, *hook: Any) -> None:
        self.last = time.process_time()

    def on_train_epoch_end(self, *hook: Any) -> None:
        now = time.process_time()
        self.rounds.append(now - self.start)
        self.after.append(now - self.last)


def run(clients: int, cohort: int, rounds: int, logged: bool) -> list[str]:
    """One federation, in this process; a row of the table."""
    torch.manual_seed(0)
    count = clients * SAMPLES + 1000
    x = torch.randn(count, NUMBERS)
    clock = Clock()
    data = FederatedDataModule(
        TensorDataset(x, (x[:, 0] > 0).long()),
        IIDPartitioner(clients),
        batch_size=SAMPLES,
        splits=Splits(server_val=1000 / count),
    )
    module = ClassifierClient(nn.Linear(NUMBERS, CLASSES), num_classes=CLASSES, input_shape=(NUMBERS,))
    loop = FederatedLoop(
        ShapFedWA("cssv"),
        metrics={"cssv": ClassSpecificShapley()},
        sampler=UniformSampler(cohort),
        seed=0,
        reporting=Reporting(table=False, figures=0),
    )
    with tempfile.TemporaryDirectory() as folder:
        saving = ModelCheckpoint(folder, save_last=True)
        trainer = L.Trainer(
            max_epochs=rounds,
            accelerator="cpu",
            callbacks=[loop, clock, saving],
            logger=[TensorBoardLogger(folder), CSVLogger(folder)] if logged else False,
            enable_progress_bar=False,
            enable_model_summary=False,
            num_sanity_val_steps=0,
            default_root_dir=folder,
        )
        trainer.fit(module, data)
        size = Path(folder, "last.ckpt").stat().st_size / 2**20
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    third = max(1, (rounds - 1) // 3)
    times = [statistics.median(each) for each in (clock.rounds[1 : third + 1], clock.rounds[-third:], clock.after[1:])]
    seconds = [f"{each:.3f}" for each in times]
    return [f"{clients:,}", f"{clock.setup:.1f}", *seconds, f"{memory:.2f} GiB", f"{size:.1f} MiB"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", nargs="+", type=int, default=[1000, 10_000, 100_000, 1_000_000])
    parser.add_argument("--cohort", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--logged", action="store_true", help="with TensorBoard and CSV files")
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    be_quiet()
    if options.one:
        print("|".join(run(options.one, options.cohort, options.rounds, options.logged)))
        return
    seconds = ("CPU s a round, at first", "at last", "of which after the last client")
    rows = [["clients", "CPU s before the first round", *seconds, "memory", "checkpoint"]]
    for clients in options.clients:
        command = [sys.executable, __file__, "--one", str(clients), "--cohort", str(options.cohort)]
        command += ["--rounds", str(options.rounds), *(["--logged"] if options.logged else [])]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        rows.append(done.stdout.strip().splitlines()[-1].split("|"))
        print(rows[-1], file=sys.stderr, flush=True)
    print(grid(rows))


if __name__ == "__main__":
    main()
