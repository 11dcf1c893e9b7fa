"""The data module from the command line."""

import sys
import types

import pytest
import yaml
from lightning.pytorch.cli import LightningCLI
from small_sets import Flip, Images, Linear, Somebodys

from flsv.data import FederatedDataModule


@pytest.fixture(autouse=True)
def _no_arguments(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["flsv"])


def parse(tmp_path, data, *arguments):
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({"data": data}))
    return LightningCLI(
        Linear,
        FederatedDataModule,
        run=False,
        save_config_callback=None,
        seed_everything_default=False,
        trainer_defaults={"accelerator": "cpu", "logger": False},
        args=["--config", str(tmp_path / "config.yaml"), *arguments],
    ).datamodule


def test_yaml_of_a_data_module_and_a_transform(tmp_path, monkeypatch):
    # Class paths are imported, and pytest does not make this file importable.
    project = types.ModuleType("somebodys_project")
    monkeypatch.setitem(sys.modules, "somebodys_project", project)
    for kind in (Somebodys, Flip, Images):
        monkeypatch.setattr(kind, "__module__", "somebodys_project")
        setattr(project, kind.__name__, kind)
    data = parse(
        tmp_path,
        {
            "source": {"class_path": "somebodys_project.Somebodys", "init_args": {"size": 50}},
            "train_transform": {"class_path": "somebodys_project.Flip", "init_args": {"factor": 3.0}},
        },
    )
    assert data.source.size == 50
    assert data.train_transform.factor == 3.0
    assert parse(tmp_path, {"source": "somebodys_project.Somebodys"}).source.size == 120
    pair = [{"class_path": "somebodys_project.Images", "init_args": {"length": n}} for n in (30, 10)]
    assert [len(part) for part in parse(tmp_path, {"source": pair}).source] == [30, 10]
