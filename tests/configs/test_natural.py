"""Natural federations, from configuration files to contributions."""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
import yaml
from sklearn.metrics import f1_score, roc_auc_score
from torch import Tensor

from flsv import FederatedLoop
from flsv.cli.parser import make_cli

pytestmark = pytest.mark.slow

CONFIGS = Path(__file__).parents[2] / "configs" / "natural"
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
#: How many clients the files have.
CLIENTS = {"clinics": 4, "districts": 60, "reuters": 5, "schools": 65, "tales": 5}


class Watching(L.Callback):
    """The value of the model by which clients are paid, before the first round and after each."""

    def __init__(self, value: Callable[[L.LightningModule, Any], float]) -> None:
        self.value, self.values = value, list[float]()

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        training = pl_module.training
        with torch.no_grad():
            batches = list(trainer.datamodule.val_dataloader())  # type: ignore[attr-defined]
            self.values.append(self.value(pl_module.eval(), [torch.cat(part) for part in zip(*batches)]))
        pl_module.train(training)

    on_train_epoch_end = on_train_start


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


@pytest.mark.parametrize("name", CLIENTS)
def test_shapley_values_of_a_natural_federation_sum_to_the_gain_of_the_global_model(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """All of it (efficiency), round by round."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["flsv"])
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")  # to be restored: seed_everything sets it
    path = yaml.safe_load((CONFIGS / f"{name}.yaml").read_text())["data"]["source"]["init_args"]["path"]
    if ROOT is None or not Path(ROOT, path).exists():
        pytest.skip(f"FLSV_DATA_ROOT is not set, or has no {path}")
    options = {"data.source.init_args.root": ROOT, **QUICK, **SMALLER.get(name, {})}
    cli = make_cli(
        ["--config", str(CONFIGS / f"{name}.yaml"), *(f"--{key}={options[key]}" for key in options)], run=False
    )
    watching = Watching(VALUES[name])
    cli.trainer.callbacks.append(watching)
    cli.trainer.fit(cli.model, cli.datamodule)
    (loop,) = (each for each in cli.trainer.callbacks if isinstance(each, FederatedLoop))
    contributions, values = loop.metrics["shapley"].compute(), watching.values
    assert len(values) == QUICK["trainer.max_epochs"] + 1
    seen = ~contributions.isnan()
    assert contributions[seen].sum().item() == pytest.approx(values[-1] - values[0], abs=2e-5)
    assert contributions[seen].abs().max() > 1e-4
    assert seen.sum() >= 3
    assert contributions.shape == (CLIENTS[name],)
    assert values[-1] > values[0]
    assert cli.datamodule.client_names == loop.metrics["shapley"].client_names
