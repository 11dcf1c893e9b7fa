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
    """Return what a command line builds, without training: model, data and federation."""

    def build_from_command_line(*configs, arguments=()):
        calls_of_fit = []

        @functools.wraps(L.Trainer.fit)  # the command line reads fit's signature
        def record_call(self, model, datamodule, **_):
            calls_of_fit.append((model, datamodule, find_loop(self.callbacks)))

        with monkeypatch.context() as patch:
            patch.setattr(L.Trainer, "fit", record_call)
            run(*configs, arguments=arguments)

        ((model, data, loop),) = calls_of_fit
        assert isinstance(data, FederatedDataModule)
        return model, data, loop

    return build_from_command_line


@pytest.fixture
def deal(load):
    """The data of a scenario, dealt out: by default on the quick start's digits."""

    def set_up_scenario(scenario, base="digits", arguments=()):
        _, data, _ = load(
            CONFIGS / f"{base}.yaml", SCENARIOS / f"{scenario}.yaml", arguments=arguments
        )
        data.setup("fit")
        return data

    return set_up_scenario
