"""The configuration files: each one loads, and each scenario with a base."""

from pathlib import Path

import pytest
import torch

from flsv import ClassifierClient
from helpers.data import CONFIGS, SCENARIOS


@pytest.mark.slow
def test_cifar10_resnet34_configuration_can_be_built(load):
    model, _, _ = load(CONFIGS / "cifar10_resnet34.yaml")
    assert isinstance(model, ClassifierClient)


TEST_OF_PAPERS = Path(__file__).with_name("test_papers.py").read_text()
ALL_SCENARIOS = {path.stem: path for path in sorted(SCENARIOS.glob("*.yaml"))}
OTHER_SCENARIOS = [name for name in ALL_SCENARIOS if name not in TEST_OF_PAPERS]


@pytest.mark.by_turn
@pytest.mark.slow
@pytest.mark.parametrize("name", OTHER_SCENARIOS)
def test_every_scenario_composes_with_a_base(load, name):
    scenario = ALL_SCENARIOS[name]
    model, data, loop = load(CONFIGS / "fashion_mnist.yaml", scenario)
    # What the scenario does not speak of stays the base's.
    assert model.hparams["network"] == "lenet5"
    assert [name for name in loop.metrics if name != "epsilon"] == ["cssv"]

    if "source:" not in scenario.read_text():
        assert data.source == "fashion_mnist"


@pytest.mark.slow
def test_share_in_a_configuration_may_be_a_callable(load, tmp_path):
    (tmp_path / "share.yaml").write_text(
        "federation: {share: {class_path: helpers.models.OfShape, init_args: {dimensions: 2}}}"
    )
    _, _, loop = load(CONFIGS / "digits.yaml", tmp_path / "share.yaml")

    assert loop.share.dimensions == 2
    assert loop.share("weight", torch.zeros(3, 3))


@pytest.mark.slow
def test_scaffold_configuration_removes_momentum_and_changes_nothing_else(load):
    model, _, _ = load(CONFIGS / "fashion_mnist.yaml", CONFIGS / "scaffold.yaml")
    (group,) = model._make_optimizer([torch.nn.Parameter(torch.zeros(1))]).param_groups
    assert (group["lr"], group["momentum"]) == (0.05, 0)
