"""Packages that import ``pytorch_lightning`` train in a federation of ``lightning``."""

import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

from flsv.cli import main
from flsv.utilities.one_lightning import import_as_lightning
from helpers import refused
from helpers.forked import Forked

#: A package as strangers write them.
PACKAGE = """
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import Callback
from pytorch_lightning.utilities.rank_zero import rank_zero_info

class Model(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 2)

    def forward(self, x):
        return self.layer(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        return torch.nn.functional.cross_entropy(self(x), y)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

class Counts(Callback):
    batches = 0

    def on_train_batch_end(self, *arguments):
        self.batches += 1

class Samples(pl.LightningDataModule):
    def train_dataloader(self):
        x = torch.randn(16, 4, generator=torch.Generator().manual_seed(0))
        samples = torch.utils.data.TensorDataset(x, (x[:, 0] > 0).long())
        return torch.utils.data.DataLoader(samples, batch_size=8, shuffle=True)
"""
CONFIG = """
model: strangers.Model
data:
  source: strangers.Samples
  partitioner: {class_path: SizePartitioner, init_args: {proportions: [1, 1]}}
federation: {metrics: {cgsv: CosineGradientShapley}}
trainer: {max_epochs: 1, accelerator: cpu, callbacks: strangers.Counts}
"""
PROGRAM = """
import flsv
flsv.import_as_lightning()
flsv.import_as_lightning()

import lightning as L
from strangers import Counts, Model

print(issubclass(Model, L.LightningModule), issubclass(Counts, L.Callback))
print(L.pytorch.__spec__.name, L.pytorch.callbacks.__spec__.name)
import pytorch_lightning.nothing
"""


def run_beside_package(function, argument):
    """Call it in a folder with the package, in which an import changes nothing for other tests."""
    Path("strangers.py").write_text(PACKAGE)
    sys.path.insert(0, "")
    return function(argument)


@pytest.mark.slow
def test_package_of_pytorch_lightning_has_lightnings_classes_after_the_call(tmp_path):
    """A second call changes nothing, and a module that lightning does not have is not found."""
    _, output = Forked(tmp_path, run_beside_package, exec, PROGRAM).wait()

    assert "True True" in output
    assert "lightning.pytorch lightning.pytorch.callbacks" in output
    assert "No module named 'pytorch_lightning.nothing'" in output


def test_call_after_the_first_import_is_refused(monkeypatch):
    other_package = ModuleType("pytorch_lightning")
    monkeypatch.setitem(sys.modules, "pytorch_lightning", other_package)

    with refused("pytorch_lightning is imported already"):
        import_as_lightning()


@pytest.mark.slow
def test_a_configuration_may_name_classes_of_such_a_package(tmp_path):
    """A module and a callback, by class paths, without a call in the program."""
    (tmp_path / "federation.yaml").write_text(CONFIG)

    command = ["fit", "--config", "federation.yaml", "-q"]
    status, output = Forked(tmp_path, run_beside_package, main, command).wait()

    assert status == 0, output
    record = json.loads((tmp_path / "lightning_logs/version_0/run.json").read_text())
    assert record["module"] == "Model"
    assert record["rounds_done"] == 1
