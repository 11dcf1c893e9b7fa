"""The seed of a run is that of its configuration, whoever calls ``seed_everything`` in between."""

import sys

import pytest
import yaml

from flsv.cli import main
from flsv.results import open_run
from flsv.results.folder import RETRAINED

SEED = 7
MODULE = """
import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Net(L.LightningModule):
    def __init__(self, seed_in_constructor=None):
        super().__init__()
        if seed_in_constructor is not None:
            L.seed_everything(seed_in_constructor)
        self.net = nn.Linear(3, 2)

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", nn.functional.cross_entropy(self(batch[0]), batch[1]))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Data(L.LightningDataModule):
    def __init__(self, seed_in_constructor=None, seed_in_setup=None):
        super().__init__()
        self.seed_in_setup = seed_in_setup
        if seed_in_constructor is not None:
            L.seed_everything(seed_in_constructor)

    def setup(self, stage):
        if self.seed_in_setup is not None:
            L.seed_everything(self.seed_in_setup)
        x = torch.randn(60, 3, generator=torch.Generator().manual_seed(0))
        y = (x.sum(1) > 0).long()
        self.train = TensorDataset(x[:40], y[:40])
        self.val = TensorDataset(x[40:], y[40:])

    def train_dataloader(self):
        return DataLoader(self.train, batch_size=8, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.val, batch_size=20)
"""
MODULE_FILE = "seeds_of_its_own"


def fit_by_command(monkeypatch, folder, module_arguments=None, data_arguments=None):
    """The record of a run by the command line."""
    folder.mkdir()
    (folder / f"{MODULE_FILE}.py").write_text(MODULE)
    monkeypatch.syspath_prepend(folder)
    sys.modules.pop(MODULE_FILE, None)

    source = {"class_path": f"{MODULE_FILE}.Data", "init_args": data_arguments or {}}
    sizes = {"class_path": "SizePartitioner", "init_args": {"proportions": [3, 1, 2]}}
    config = {
        "seed_everything": SEED,
        "model": {"class_path": f"{MODULE_FILE}.Net", "init_args": module_arguments or {}},
        "data": {"source": source, "partitioner": sizes},
        "federation": {"reporting": {"table": False}},
        "trainer": {"max_epochs": 1, "accelerator": "cpu", "default_root_dir": str(folder)},
    }
    config_file = folder / "federation.yaml"
    config_file.write_text(yaml.safe_dump(config))

    assert main(["fit", "--config", str(config_file), "-q"]) == 0
    return open_run(folder / "lightning_logs/version_0").record


@pytest.mark.slow
def test_run_of_a_program_that_seeds_itself_has_its_configurations_seed(tmp_path, monkeypatch):
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")
    monkeypatch.chdir(tmp_path)

    plain = fit_by_command(monkeypatch, tmp_path / "plain")
    seeded = fit_by_command(
        monkeypatch,
        tmp_path / "seeded",
        module_arguments={"seed_in_constructor": 1},
        data_arguments={"seed_in_constructor": 2, "seed_in_setup": 3},
    )

    assert seeded["settings"]["federation_seed"] == SEED
    assert seeded["hashes"] == plain["hashes"]
    run = tmp_path / "seeded/lightning_logs/version_0"
    saved_config = yaml.safe_load((run / "config.yaml").read_text())
    assert saved_config["federation"]["seed"] is None, "it would override --seed_everything"

    by_loss = ["--metric", "val_loss", "--mode", "min"]
    assert main(["retrain", str(run), "--seeds", "1", "--trainings", "singles", *by_loss]) == 0
    retrained_run = open_run(run / RETRAINED / f"seed_{SEED}")
    assert retrained_run.record["hashes"] == seeded["hashes"]
