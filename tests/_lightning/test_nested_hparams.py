"""Lightning's own LightningCLI, with the loop among the trainer's callbacks: whose hyper-parameters are whose."""

import sys
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import yaml
from lightning.pytorch.cli import LightningCLI
from torch.utils.data import DataLoader, TensorDataset

from flsv import FederatedDataModule
from flsv.cli.parser import make_cli
from helpers.data import FEATURES
from helpers.fits import state_vector
from helpers.models import Plain, network


class Module(Plain):
    def __init__(self, width: int = 8) -> None:
        super().__init__(network(batch_norm=False))
        self.save_hyperparameters()


class Data(L.LightningDataModule):
    def __init__(self, batch_size: int = 8, samples: int = 100) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.half = self.hparams.samples // 2  # in __init__ already

    def setup(self, stage: str) -> None:
        x = torch.randn(2 * self.half, FEATURES, generator=torch.Generator().manual_seed(0))
        self.sets = TensorDataset(x, (x[:, 0] > 0).long() + (x[:, 1] > 0))

    def train_dataloader(self) -> Any:
        return DataLoader(self.sets, batch_size=self.hparams.batch_size, shuffle=True)


HERE = "_lightning.test_nested_hparams"
OWN = {"batch_size": 8, "samples": 60}


def test_lightning_cli_with_the_loop_trains_a_federation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["fit.py"])
    partitioner = {"class_path": "flsv.data.IIDPartitioner", "init_args": {"num_clients": 3}}
    source = {"class_path": f"{HERE}.Data", "init_args": {"samples": 60}}
    loop = {
        "metrics": {"cssv": "flsv.metrics.ClassSpecificShapley"},
        "seed": 1,
        "reporting": {"table": False},
    }
    trainer = {
        "max_epochs": 2,
        "accelerator": "cpu",
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "default_root_dir": str(tmp_path),
        "callbacks": [{"class_path": "flsv.FederatedLoop", "init_args": loop}],
    }
    config = {"model": f"{HERE}.Module", "data": {"source": source, "partitioner": partitioner}}
    config_file = tmp_path / "own.yaml"
    path = tmp_path / "federation.yaml"
    config_file.write_text(yaml.safe_dump(config))
    whole_config = {**config, "trainer": trainer, "seed_everything": 3}
    path.write_text(yaml.safe_dump(whole_config))

    def run(*options: str) -> LightningCLI:
        return LightningCLI(
            datamodule_class=FederatedDataModule,
            args=["fit", "--config", str(path), *options],
        )

    whole = run()
    assert dict(whole.datamodule.source.hparams) == OWN
    assert whole.datamodule.num_samples.sum() == 54
    assert whole.model.hparams.width == 8
    assert whole.model.hparams._class_path == f"{HERE}.Module"
    assert Path(whole.trainer.log_dir or "", "contributions.csv").is_file()

    half = run("--trainer.max_epochs", "1")
    log_folder = Path(half.trainer.log_dir or "")
    (checkpoint,) = (log_folder / "checkpoints").iterdir()
    resumed = run("--ckpt_path", str(checkpoint))

    assert resumed.trainer.current_epoch == 2
    assert torch.equal(state_vector(resumed.model), state_vector(whole.model))

    # So it is on flsv's own command line.
    by_flsv = make_cli(["--config", str(config_file)], run=False, quiet=True)
    assert dict(by_flsv.datamodule.source.hparams) == OWN
