"""Configurations as a command line runs them, builds them and deals out their data."""

import functools
import sys

import lightning as L
import pytest

from flsv import FederatedDataModule
from flsv._lightning.patches import find_loop
from flsv.cli import main
from helpers.data import CONFIGS, SCENARIOS


@pytest.fixture
def run(monkeypatch, tmp_path):
    """The command line in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["flsv"])

    def run_fit(*configs, arguments=()):
        options = []
        for config in configs:
            options += ["--config", str(config)]
        options += ["--trainer.enable_progress_bar", "false", *arguments]
        assert main(["fit", *options]) == 0

    return run_fit


@pytest.fixture
def load(monkeypatch, run):
    """What a command line builds, without training: model, data and federation."""

    def command(*configs, arguments=()):
        built = {}

        @functools.wraps(L.Trainer.fit)  # the command line reads fit's signature
        def fit(self, model, datamodule, **_):
            built.update(model=model, data=datamodule)
            built["loop"] = find_loop(self.callbacks)

        with monkeypatch.context() as patch:
            patch.setattr(L.Trainer, "fit", fit)
            run(*configs, arguments=arguments)

        assert isinstance(built["data"], FederatedDataModule)

        return built["model"], built["data"], built["loop"]

    return command


@pytest.fixture
def deal(load):
    """The data of a scenario, dealt out: by default on the quick start's digits."""

    def command(scenario, base="digits", arguments=()):
        _, data, _ = load(
            CONFIGS / f"{base}.yaml", SCENARIOS / f"{scenario}.yaml", arguments=arguments
        )
        data.setup("fit")
        return data

    return command
