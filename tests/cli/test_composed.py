"""A packaged configuration sets what it is about, and what one file takes out of another is said."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import yaml

from flsv import FederatedLoop
from flsv.cli.configs import FOLDER, overridden
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
    added, another = ({"federation": {name: [kind]}} for name, kind in (("uploads+", "TopK"), ("uploads", "SignFlip")))
    assert overridden([("private", another), ("topk", added)]) == []
    assert len(overridden([("topk", added), ("mine", another)])) == 1


@pytest.mark.parametrize("name", ABOUT_ELSE)
def test_what_is_about_something_else_sets_no_aggregator(name: str) -> None:
    said = yaml.safe_load((FOLDER / f"{name}.yaml").read_text())["federation"]
    assert said.keys() <= {"metrics", "uploads+", "share", "client_algorithm"}


def test_fedavg_is_weighted_by_samples_whatever_came_before() -> None:
    assert loop_of("scaffold", "fedavg").aggregator.weighting == "samples"


FIRST = {
    "seed_everything": 1,
    "data": {"partitioner": {"class_path": "flsv.data.DirichletPartitioner", "init_args": {"num_clients": 3}}},
    "federation": {
        "aggregator": {"class_path": "flsv.aggregation.FedAvgM", "init_args": {"lr": 0.5}},
        "metrics": {"cssv": "ClassSpecificShapley", "cgsv": None},
    },
    "model": {"init_args": {"network": "mlp", "network_args": {"hidden": [3]}}},
}


@pytest.mark.parametrize(
    ("later", "lines"),
    [
        (FIRST, []),
        ({"federation": {"aggregator": {"class_path": "FedAvgM", "init_args": {"momentum": 0.1}}}}, []),
        ({"federation": {"aggregator": {"init_args": {"lr": 0.1}}}}, ["federation.aggregator is (lr=0.1) (b)"]),
        ({"federation": {"aggregator": "FedAvg"}}, ["FedAvg (b) and no longer FedAvgM(lr=0.5) (a)."]),
        (
            {"federation": {"aggregator": None}},
            ["federation.aggregator is null (b) and no longer FedAvgM(lr=0.5) (a)."],
        ),
        ({"federation": {"metrics": {"sv": "PartialFederatedShapley"}}}, []),
        ({"federation": {"metrics": None}}, ["federation.metrics.cssv is null", "federation.metrics.cgsv is null"]),
        (
            {"data": {"partitioner": {"class_path": "IIDPartitioner"}}},
            ["no longer DirichletPartitioner(num_clients=3) (a)."],
        ),
        ({"model": {"init_args": {"network_args": {}}}}, ["model.init_args.network_args is {} (b)"]),
        ({"seed_everything": 2}, ["seed_everything is 2 (b) and no longer 1 (a)."]),
        ({"data": {"root": "data"}}, []),
        (None, []),
    ],
)
def test_what_a_later_file_takes_the_place_of(later: object, lines: list[str]) -> None:
    said = overridden([("a", FIRST), ("b", later)])
    assert len(said) == len(lines)
    assert all(expected in line for expected, line in zip(lines, said))


def test_of_three_files_the_one_before_is_named() -> None:
    files = [(name, {"data": {"batch_size": size}}) for name, size in (("a", 8), ("b", 16), ("c", 32))]
    assert overridden(files) == [
        "data.batch_size is 16 (b) and no longer 8 (a).",
        "data.batch_size is 32 (c) and no longer 16 (b).",
    ]


@pytest.mark.parametrize("quiet", [False, True])
def test_the_command_line_says_it(capsys: pytest.CaptureFixture[str], quiet: bool) -> None:
    configs = [option for name in ("quickstart", "fedadam") for option in ("--config", name)]
    make_cli(["fit", *configs, "--trainer.fast_dev_run=true"], quiet=quiet)
    said = "flsv: federation.aggregator is FedAdam(lr=0.01, beta1=0.9, beta2=0.99, tau=0.001) (fedadam) and no longer "
    assert (said in capsys.readouterr().err) is not quiet
