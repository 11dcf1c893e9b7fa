"""Numbers that clients make up, and who is paid for them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from toys import Plain, fit, network, toy_data, vector

from flsv import Reporting
from flsv.attacks import Attack, FalseReports
from flsv.benchmark.registry import TrainingLoss
from flsv.errors import ConfigurationError
from flsv.loop import FederatedLoop
from flsv.metrics import ContributionEstimation, ContributionMetric


def values(folder: Path, metric: ContributionMetric, attacks: list[Attack], **kwargs: Any) -> tuple[Tensor, Tensor]:
    loop = FederatedLoop(metrics={"m": metric}, uploads=attacks, seed=1, reporting=Reporting(table=False), **kwargs)
    data = toy_data((4, 3, 4), client_val=0.3)
    module = fit(loop, folder, Plain(network(batch_norm=False)), data, rounds=2)
    return loop.contributions["m"], vector(module)


@pytest.mark.parametrize("engine", ["sequential", "vmap"])
def test_the_loss_is_what_it_says_and_nothing_else_changes(tmp_path: Path, engine: str) -> None:
    lie = FalseReports(loss=0.001, clients=[1])
    honest, model = values(tmp_path / "honest", TrainingLoss(), [], engine=engine)
    told, same = values(tmp_path / "told", TrainingLoss(), [lie], engine=engine)
    assert told[1] == pytest.approx(-0.001)
    assert honest[1] < -0.01
    assert torch.equal(told[[0, 2]], honest[[0, 2]])
    assert torch.equal(model, same)


def test_fedces_estimate_pays_whoever_says_that_the_others_do_badly(tmp_path: Path) -> None:
    lie = FalseReports(score=0.0, clients=[1])
    honest, _ = values(tmp_path / "honest", ContributionEstimation(), [])
    told, _ = values(tmp_path / "told", ContributionEstimation(), [lie])
    assert told[1] > 1.2 * honest[1]
    assert told[0] < honest[0]


def test_two_lies_are_told_one_after_the_other(tmp_path: Path) -> None:
    class Half(FalseReports):
        def tell(self, name: str, value: float, context: Any) -> float:
            return value / 2 if name == "loss" else value

    told, _ = values(tmp_path, TrainingLoss(), [FalseReports(loss=1.0, clients=[0]), Half(loss=1.0)])
    assert told[0] == pytest.approx(-0.5)


def test_what_cannot_be() -> None:
    with pytest.raises(ConfigurationError, match="nothing is false"):
        FalseReports()
    with pytest.raises(ConfigurationError, match="loss"):
        FalseReports(loss=math.nan)
