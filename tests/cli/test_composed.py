"""A packaged configuration sets what it is about."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import yaml

from flsv import FederatedLoop
from flsv.cli.configs import FOLDER
from flsv.cli.parser import make_cli

ABOUT_ELSE = (
    *("topk", "quantized", "lora", "beta_shapley", "fedbary", "gradient_agreement"),
    *("in_run_shapley", "lower_bound"),
)


def loop_of(*configs: str) -> FederatedLoop:
    cli = make_cli([option for name in configs for option in ("--config", name)], run=False)
    return next(each for each in cli.trainer.callbacks if isinstance(each, FederatedLoop))  # type: ignore[attr-defined]


@pytest.fixture(autouse=True)
def _own_command_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["flsv"])
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")  # to be restored: seed_everything sets it


@pytest.mark.parametrize("configs", [("fedadam", "topk"), ("topk", "fedadam")])
def test_compression_and_an_aggregator_come_together_in_either_order(configs: tuple[str, ...]) -> None:
    loop = loop_of(*configs)
    assert type(loop.aggregator).__name__ == "FedAdam"
    assert [type(upload).__name__ for upload in loop.uploads] == ["TopK"]


def test_uploads_of_several_files_add_up() -> None:
    loop = loop_of("scenarios/private", "topk")
    assert [type(upload).__name__ for upload in loop.uploads] == ["GaussianPrivacy", "TopK"]


@pytest.mark.parametrize("name", ABOUT_ELSE)
def test_what_is_about_something_else_sets_no_aggregator(name: str) -> None:
    said = yaml.safe_load((FOLDER / f"{name}.yaml").read_text())["federation"]
    assert said.keys() <= {"metrics", "uploads+", "share", "client_algorithm"}


def test_fedavg_is_weighted_by_samples_whatever_came_before() -> None:
    assert loop_of("scaffold", "fedavg").aggregator.weighting == "samples"
