"""Numbers that clients make up, and who is paid for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from toys import Plain, fit, network, toy_data, vector

from flsv import Reporting
from flsv.attacks import Attack, FalseReports
from flsv.benchmark.registry import TrainingLoss
from flsv.loop import FederatedLoop
from flsv.metrics import ContributionMetric


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
