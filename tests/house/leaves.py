"""Runs without parts of flsv, each in a fork of this process: ``python leaves.py FOLDER``.

Each line that it prints is the name of a run, and the fork's exit status.
"""

import os
import sys
import traceback
from pathlib import Path

import lightning as L
import torch
from torch import nn
from torch.utils.data import TensorDataset

from helpers import make_generator

#: What a run by ``flsv fit`` can be without.
LEAVES = (
    "flsv.attacks",
    "flsv.contrib",
    "flsv.engines.flower",
    "flsv.engines.nvflare",
    "flsv.engines.remote",
    "flsv.engines.vmap",
    "flsv.outside",
    "flsv.report",
    "flsv.retraining",
    "flsv.testing",
    "flsv.valuation",
)
#: What a run in Python can be without, besides.
LEAVES_OF_PYTHON = ("flsv.cli", "flsv.engines.ranks", "flsv.models")
#: Files that a run in Python of data in memory can be without, all at once.
FILES = (
    "flsv.data.corruption",
    "flsv.data.sources.named",
    "flsv.data.tables",
    "flsv.metrics.costs",
    "flsv.metrics.plot",
    "flsv.privacy",
)
#: Files that a run can be without, besides, if it scores no models.
FILES_OF_SCORING = (
    "flsv.engines.scoring",
    "flsv.federation.learning",
    "flsv.games.module_copies",
    "flsv.scores.performance",
    "flsv.scores.class_scores",
)


class Refusal:
    """A finder that finds no module of the given packages, as if they were not there."""

    def __init__(self, packages):
        self.packages = packages

    def find_spec(self, name, path=None, target=None):
        for package in self.packages:
            if name == package or name.startswith(f"{package}."):
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return


class Linear(L.LightningModule):
    """A module that knows nothing of flsv."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, inputs):
        return self.layer(inputs)

    def training_step(self, batch, batch_idx):
        inputs, labels = batch
        return nn.functional.cross_entropy(self(inputs), labels)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit_in_python(folder):
    """Train a federation, with values of a coalition game."""
    from flsv.metrics import CumulativeShapley

    contributions = contributions_of_a_fit(folder, {"shapley": CumulativeShapley()})

    assert torch.isfinite(torch.as_tensor(contributions["shapley"])).all()


def fit_without_metrics(folder):
    assert contributions_of_a_fit(folder, {}) == {}


def contributions_of_a_fit(folder, metrics):
    """Train a federation of a module and tensors of one's own."""
    from flsv import FederatedDataModule, FederatedLoop
    from flsv.aggregation import FedAvg

    generator = make_generator()
    inputs = torch.randn(60, 4, generator=generator)
    labels = inputs[:, :3].argmax(dim=1)
    clients = {}
    for number, rows in enumerate(torch.arange(60).split(20)):
        clients[f"client {number}"] = TensorDataset(inputs[rows], labels[rows])

    data = FederatedDataModule(clients=clients, val=TensorDataset(inputs, labels), batch_size=10)
    loop = FederatedLoop(aggregator=FedAvg(), metrics=metrics, seed=0)
    trainer = L.Trainer(
        max_epochs=2,
        callbacks=[loop],
        accelerator="cpu",
        default_root_dir=folder,
        enable_progress_bar=False,
    )
    trainer.fit(Linear(), data)
    return loop.contributions


def fit_by_command(folder):
    """Train the digits by FedAvg for a round."""
    from flsv.cli.entry import main

    options = {
        "trainer.max_epochs": 1,
        "trainer.limit_train_batches": 2,
        "trainer.accelerator": "cpu",
        "trainer.enable_progress_bar": "false",
        "trainer.default_root_dir": folder,
    }
    words = [f"--{name}={value}" for name, value in options.items()]

    assert main(["fit", "--config=digits", "--config=fedavg", *words]) == 0


def run_without(packages, run, folder):
    """Print how a run ends without these packages."""
    folder.mkdir()
    child = os.fork()
    if child == 0:
        sys.meta_path.insert(0, Refusal(packages))
        status = 1
        try:
            run(folder)
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(status)

    _, status = os.waitpid(child, 0)
    print("RUN", folder.name, os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    main_folder = Path(sys.argv[1])
    # A run that misses none of them misses no single one.
    run_without(LEAVES, fit_by_command, main_folder / "command")
    run_without([*LEAVES, *LEAVES_OF_PYTHON, *FILES], fit_in_python, main_folder / "python")
    run_without(FILES_OF_SCORING, fit_without_metrics, main_folder / "unscored")
