"""Packages that import ``pytorch_lightning`` train in a federation of ``lightning``."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec

import pytest

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
"""
DATA = """
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
FIT = """
import lightning as L
import torch
from torch.utils.data import TensorDataset
from flsv import FederatedDataModule, FederatedLoop
from flsv.metrics import CosineGradientShapley

from strangers import Counts, Model

x = torch.randn(16, 4, generator=torch.Generator().manual_seed(0))
samples = TensorDataset(x, (x[:, 0] > 0).long())
loop = FederatedLoop(metrics={"cgsv": CosineGradientShapley()}, seed=1)
counts = Counts()
trainer = L.Trainer(max_epochs=1, callbacks=[loop, counts], logger=False, accelerator="cpu")
data = FederatedDataModule(clients={"a": samples, "b": samples}, batch_size=8)
trainer.fit(Model(), data)
print("batches", counts.batches, "finite", bool(loop.contributions["cgsv"].isfinite().all()))
print("spec", L.pytorch.__spec__.name, L.pytorch.callbacks.__spec__.name)
"""
CALL = "import flsv\nflsv.import_as_lightning()\n"


def run_program(folder, program):
    (folder / "strangers.py").write_text(PACKAGE)
    return subprocess.run(
        [sys.executable, "-c", program],
        cwd=folder,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )


@pytest.mark.slow
def test_package_of_pytorch_lightning_trains_after_the_call(tmp_path):
    """A second call changes nothing, and a module that lightning does not have is not found."""
    process = run_program(tmp_path, 2 * CALL + FIT + "import pytorch_lightning.nothing")

    assert "batches 4 finite True" in process.stdout, process.stderr
    assert "spec lightning.pytorch lightning.pytorch.callbacks" in process.stdout
    assert "No module named 'pytorch_lightning.nothing'" in process.stderr


@pytest.mark.slow
def test_call_after_the_first_import_is_refused(tmp_path):
    # An import in this process would fail the doctest of import_as_lightning, where it comes later in the same worker.
    if find_spec("pytorch_lightning") is None:
        pytest.skip("needs pytorch_lightning")

    process = run_program(tmp_path, f"import pytorch_lightning.callbacks\n{CALL}")

    assert "ConfigurationError: pytorch_lightning is imported already" in process.stderr


@pytest.mark.slow
def test_a_configuration_may_name_classes_of_such_a_package(tmp_path):
    """A module and a callback, by class paths, without a call in the program."""
    (tmp_path / "strangers.py").write_text(PACKAGE + DATA)
    (tmp_path / "federation.yaml").write_text(CONFIG)

    process = subprocess.run(
        [sys.executable, "-m", "flsv", "fit", "--config", "federation.yaml", "-q"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )

    assert process.returncode == 0, process.stderr
    record = json.loads((tmp_path / "lightning_logs/version_0/run.json").read_text())
    assert record["module"] == "Model"
    assert record["rounds_done"] == 1
