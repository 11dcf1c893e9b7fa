"""Natural federations, from configuration files to contributions: on small files made here, and on the real ones."""

from __future__ import annotations

import csv
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
import torch.nn.functional as F
import yaml
from sklearn.metrics import f1_score, roc_auc_score
from torch import Tensor

from flsv import FederatedLoop
from flsv.cli.parser import make_cli
from flsv.games.replica import copied

pytestmark = pytest.mark.slow

CONFIGS = Path(__file__).parents[1] / "configs" / "natural"
NAMES = ("clinics", "districts", "reuters", "schools", "tales")
ROOT = os.environ.get("FLSV_DATA_ROOT")
QUICK = {
    "trainer.max_epochs": 2,
    "trainer.logger": "false",
    "trainer.enable_checkpointing": "false",
    "trainer.enable_progress_bar": "false",
    "trainer.enable_model_summary": "false",
    "federation.reporting.table": "false",
    "federation.reporting.figures": 0,
}
#: A cohort of 3 is 8 coalitions, and a small recurrent layer is enough to see that it works.
SMALLER = {
    "schools": {"federation.sampler.init_args.cohort_size": 3},
    "districts": {"federation.sampler.init_args.cohort_size": 3},
    "tales": {
        "model.init_args.hidden": 8,
        "trainer.limit_train_batches": 5,
        "data.source.init_args.val_fraction": 0.02,
    },
}
CLIENTS = {
    "clinics": ("K", "M", "N"),
    "districts": tuple(f"district {i}" for i in range(5)),
    "reuters": tuple(map(str, range(5))),
    "schools": tuple(f"school {i}" for i in range(5)),
    "tales": ("group 0", "group 1", "group 2"),
}
WORDS = ["king", "wolf", "corn", "oil", "ship", "bank", "profit", "trade", "ate", "sank", "rose", "paid"]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A data root with files of the same names and columns as the real ones."""
    root = tmp_path_factory.mktemp("root")
    rng = np.random.default_rng(0)
    options = yaml.safe_load((CONFIGS / "clinics.yaml").read_text())["data"]["source"]["init_args"]

    def write(name: str, header: list[str], rows: list[list[Any]]) -> None:
        (root / name).parent.mkdir(exist_ok=True)
        with (root / name).open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([header, *rows])

    numbers = [name for name in options["columns"]["features"] if name != "Group"]
    rows = []
    for i in range(60):
        x = rng.normal(size=len(numbers))
        rows.append(["CT"[i % 2], "" if i % 9 == 0 else x[0], *x[1:], x[1] - x[2] + i % 2, "NMK"[i % 3]])
    write("tables/opt.csv", ["Group", *numbers, options["target"], "Clinic"], rows)
    x = rng.normal(size=80)
    write("tables/exam.csv", ["school", "student", "standLRT", "normexam"], [[i % 5, i, x[i], x[i]] for i in range(80)])
    write(
        "tables/contraception.csv",
        ["woman", "district", "livch", "age", "use"],
        [[i, i % 5, ["0", "1", "3+"][i % 3], x[i], "NY"[int(x[i] + i % 3 > 1)]] for i in range(80)],
    )
    for part, size in (("train", 160), ("test", 16)):
        texts = [[f"topic {i % 8}", " ".join([WORDS[i % 8], *rng.choice(WORDS, 5)])] for i in range(size)]
        write(f"text/reuters_r8_{part}.csv", ["label", "text"], texts)
    tales = [[f"group {i % 3}", f"Nr. {i}", "“" + ", ".join(rng.choice(WORDS, 300)) + "”"] for i in range(6)]
    write("text/grimm_tales.csv", ["group", "title", "text"], tales)
    return str(root)


class Watching(L.Callback):
    """The value of the model by which clients are paid, before the first round and after each."""

    def __init__(self, value: Callable[[L.LightningModule, Any], float]) -> None:
        self.value, self.values = value, list[float]()

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.look(trainer, pl_module)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.look(trainer, pl_module)

    def look(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        training = module.training
        with torch.no_grad():
            batches = list(trainer.datamodule.val_dataloader())  # type: ignore[attr-defined]
            self.values.append(self.value(module.eval(), [torch.cat(part) for part in zip(*batches)]))
        module.train(training)


def squared_error(module: L.LightningModule, data: list[Tensor]) -> float:
    return -float((module(data[0]).double() - data[1].double()).square().mean())


def area_under_curve(module: L.LightningModule, data: list[Tensor]) -> float:
    return float(roc_auc_score(data[1], module(data[0]).softmax(1)[:, 1]))


def macro_f1(module: L.LightningModule, data: list[Tensor]) -> float:
    predicted = module(data[0]).argmax(1)
    present = torch.unique(torch.cat([predicted, data[1]]))  # torchmetrics leaves out what nobody has or predicts
    return float(f1_score(data[1], predicted, average="macro", labels=present))


def characters(module: L.LightningModule, data: list[Tensor]) -> float:
    (pieces,) = data
    return -float(F.cross_entropy(module(pieces[:, :-1]).flatten(0, 1), pieces[:, 1:].flatten()))


VALUES = {
    "clinics": squared_error,
    "districts": area_under_curve,
    "reuters": macro_f1,
    "schools": squared_error,
    "tales": characters,
}


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Train a configuration on the files below a root; the loop, the watcher and the command line's objects."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["flsv"])
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")  # to be restored: seed_everything sets it

    def command(name: str, root: str, **more: Any) -> tuple[FederatedLoop, list[float], Any]:
        options = {"data.source.init_args.root": root, **QUICK, **SMALLER.get(name, {}), **more}
        cli = make_cli(
            ["--config", str(CONFIGS / f"{name}.yaml"), *(f"--{key}={options[key]}" for key in options)], run=False
        )
        watching = Watching(VALUES[name])
        cli.trainer.callbacks.append(watching)
        cli.trainer.fit(cli.model, cli.datamodule)
        (loop,) = (each for each in cli.trainer.callbacks if isinstance(each, FederatedLoop))
        return loop, watching.values, cli

    return command


def check(loop: FederatedLoop, values: list[float], clients: int) -> None:
    """Shapley values share out what the model has gained, all of it (efficiency), round by round."""
    contributions = loop.metrics["shapley"].compute()
    assert contributions.shape == (clients,)
    assert len(values) == QUICK["trainer.max_epochs"] + 1
    seen = ~contributions.isnan()
    assert contributions[seen].sum().item() == pytest.approx(values[-1] - values[0], abs=2e-5)
    assert contributions[seen].abs().max() > 1e-4
    assert seen.sum() >= min(clients, 3)


@pytest.mark.parametrize(("name", "clients"), [*zip(NAMES, (3, 5, 5, 5, 3))])
def test_made_data(run, made: str, name: str, clients: int) -> None:
    more = {
        "reuters": {"data.partitioner.init_args.min_samples": 5},
        "districts": {"model.init_args.optimizer.init_args.lr": 1.0},  # so little else would change nobody's rank
    }
    loop, values, cli = run(name, made, **more.get(name, {}))
    check(loop, values, clients)
    assert cli.datamodule.client_names == CLIENTS[name]
    assert loop.metrics["shapley"].client_names == CLIENTS[name]


@pytest.mark.parametrize(
    ("name", "clients"), [("clinics", 4), ("districts", 60), ("reuters", 5), ("schools", 65), ("tales", 5)]
)
def test_real_data(run, name: str, clients: int) -> None:
    if ROOT is None:
        pytest.skip("FLSV_DATA_ROOT is not set: no real tables and texts")
    source = yaml.safe_load((CONFIGS / f"{name}.yaml").read_text())["data"]["source"]["init_args"]
    if not Path(ROOT, source["path"]).exists():
        pytest.skip(f"FLSV_DATA_ROOT has no {source['path']}")
    loop, values, cli = run(name, ROOT)
    check(loop, values, clients)
    assert values[-1] > values[0]
    assert cli.datamodule.num_clients == clients


def test_the_command_lines_factories_are_not_copied(run, made: str) -> None:
    _, _, cli = run("clinics", made, **{"trainer.max_epochs": 1})
    own = copied(cli.model)
    assert own._make_optimizer is cli.model._make_optimizer
    assert all(a is not b and torch.equal(a, b) for a, b in zip(own.parameters(), cli.model.parameters()))
