"""A project's LightningCLI, with the loop among the callbacks: its file, and whose hyper-parameters these are."""

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
from flsv.cli.runs_with_seeds import config_with_seeds
from flsv.utilities.errors import ConfigurationError
from helpers import make_generator
from helpers.data import FEATURES
from helpers.fits import state_vector
from helpers.models import Plain


class Module(Plain):
    configure_optimizers = (
        L.LightningModule.configure_optimizers
    )  # the file has a section optimizer

    def __init__(self, num_classes: int, width: int = 8):
        super().__init__(torch.nn.Linear(FEATURES, num_classes))
        self.save_hyperparameters()


class Data(L.LightningDataModule):
    num_classes = 3

    def __init__(self, batch_size: int = 8, samples: int = 100):
        super().__init__()
        self.save_hyperparameters()
        self.half = self.hparams.samples // 2  # in __init__ already

    def setup(self, stage):
        x = torch.randn(
            2 * self.half,
            FEATURES,
            generator=make_generator(),
        )
        self.sets = TensorDataset(
            x,
            (x[:, 0] > 0).long() + (x[:, 1] > 0),
        )

    def train_dataloader(self):
        return DataLoader(self.sets, batch_size=self.hparams.batch_size, shuffle=True)


class LateData(Data):
    """Knows its sizes after the setup."""

    num_classes: Any = None

    def setup(self, stage):
        super().setup(stage)
        self.vocab_size = 40


class LateModule(Module):
    def __init__(
        self,
        num_classes: int,
        vocab_size: int,
        in_features: int,
    ):
        super().__init__(num_classes)
        assert (vocab_size, in_features) == (40, FEATURES)


class UnknownSize(Module):
    def __init__(self, depth: int):
        super().__init__(3)


class ProjectCLI(LightningCLI):
    def add_arguments_to_parser(self, parser):
        size = "num_classes"
        parser.link_arguments(f"data.{size}", f"model.init_args.{size}", apply_on="instantiate")


HERE = "_lightning.test_nested_hparams"
OWN = {"batch_size": 8, "samples": 60}


@pytest.mark.slow
def test_lightning_cli_with_the_loop_trains_a_federation(tmp_path, monkeypatch):
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
    optimizer = {"class_path": "torch.optim.SGD", "init_args": {"lr": 0.1}}
    config = {
        "model": f"{HERE}.Module",
        "data": {"source": source, "partitioner": partitioner},
        "optimizer": optimizer,
        "trainer": trainer,
        "seed_everything": 3,
    }
    path = tmp_path / "federation.yaml"
    path.write_text(yaml.safe_dump(config))
    arguments = ["fit", "--config", str(path)]

    def fit_by_command_line(*options):
        return ProjectCLI(datamodule_class=FederatedDataModule, args=[*arguments, *options])

    whole = fit_by_command_line()
    assert dict(whole.datamodule.source.hparams) == OWN
    assert whole.datamodule.num_samples.sum() == 54
    assert whole.model.hparams.width == 8
    assert whole.model.hparams._class_path == f"{HERE}.Module"
    assert Path(whole.trainer.log_dir or "", "contributions.csv").is_file()

    half = fit_by_command_line("--trainer.max_epochs", "1")
    log_folder = Path(half.trainer.log_dir or "")
    (checkpoint,) = (log_folder / "checkpoints").iterdir()
    resumed = fit_by_command_line("--ckpt_path", str(checkpoint))

    assert resumed.trainer.current_epoch == 2
    assert torch.equal(state_vector(resumed.model), state_vector(whole.model))

    # flsv's own command line takes the same file, and its run can be made anew.
    by_flsv = make_cli(arguments, quiet=True)
    assert torch.equal(state_vector(by_flsv.model), state_vector(whole.model))
    saved_config = yaml.safe_load(Path(by_flsv.trainer.log_dir or "", "config.yaml").read_text())
    with config_with_seeds(saved_config, seed=3) as options:
        rebuilt = make_cli(["fit", *options, "--seed_everything=3"], quiet=True)
    assert dict(rebuilt.datamodule.source.hparams) == OWN
    assert rebuilt.model.net.out_features == 3
    assert [*rebuilt.loop.metrics] == ["cssv"]


def make_late(*options):
    data = f"{{data: {{class_path: {HERE}.LateData}}}}"  # as LightningCLI names a data module
    model = f"--model={HERE}.LateModule"
    return make_cli(
        ["--config", data, model, *options],
        run=False,
        quiet=True,
    )


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:LightningCLI's args parameter")
def test_data_tell_the_model_what_it_requires():
    assert make_late().model.net.out_features == 3  # counted by flsv
    assert make_late("--model.num_classes=5").model.net.out_features == 5

    with pytest.raises(ValueError, match="argument depth is required, but") as error:
        make_late(f"--model={HERE}.UnknownSize")
    assert isinstance(error.value.__cause__, ConfigurationError)
