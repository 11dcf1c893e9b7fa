"""All coalitions side by side: what RetrainedUtility comes to, which trains them one after the other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from small_federation import small

from flsv import FederatedLoop, Reporting
from flsv.benchmark import Federation, make_truth, train_coalitions
from flsv.errors import ConfigurationError
from flsv.functional.shapley.game import all_coalitions
from flsv.games.retraining import RetrainedUtility
from flsv.loop.side_by_side import CoalitionTraining
from flsv.sampling import FixedCohort
from flsv.seeding import seed_global_rngs


def retrained(small: Federation, tmp_path: Path, seed: int, metric: str) -> RetrainedUtility:
    def trainer(cohort: FixedCohort) -> L.Trainer:
        loop = FederatedLoop(sampler=cohort, seed=seed, uploads=small.attackers(), reporting=Reporting(table=False))
        made = small.trainer(loop)
        return made

    return RetrainedUtility(trainer, small.module(), small.datamodule(), metric)


@pytest.mark.parametrize("optimizer", ["SGD", "Adam"])
def test_the_same_as_one_coalition_after_the_other(tmp_path: Path, optimizer: str) -> None:
    model = dict(small().model["init_args"]) | {
        "optimizer": {"class_path": f"torch.optim.{optimizer}", "init_args": {"lr": 0.02}}
    }
    mine = small(model={"class_path": "flsv.ClassifierClient", "init_args": model}, performance="negative_loss")
    masks = all_coalitions(3)
    together = train_coalitions(mine, masks, seed=7)
    seed_global_rngs(7, "benchmark")
    apart = retrained(mine, tmp_path, 7, "negative_loss")(masks)
    assert torch.allclose(together, apart, rtol=1e-4, atol=1e-5)
    assert apart.unique().numel() == 8 - 1 + (apart[4] != apart[0]).item()  # the coalitions do differ


def scheduled(scheduler: str, interval: str, **options: Any) -> Federation:
    made = {"class_path": f"torch.optim.lr_scheduler.{scheduler}", "init_args": options}
    optimizer = {"class_path": "torch.optim.SGD", "init_args": {"lr": 0.2, "momentum": 0.9}}
    given = {"optimizer": optimizer, "scheduler": made, "scheduler_interval": interval}
    model = dict(small().model["init_args"]) | given
    return small(model={"class_path": "flsv.ClassifierClient", "init_args": model}, rounds=3)


@pytest.mark.parametrize(
    ("scheduler", "interval", "options"),
    [
        ("StepLR", "epoch", {"step_size": 1, "gamma": 0.1}),
        ("StepLR", "step", {"step_size": 3, "gamma": 0.7}),
        ("CyclicLR", "step", {"base_lr": 0.01, "max_lr": 0.4, "step_size_up": 4}),
    ],
)
def test_schedules_are_stepped_as_in_the_run(
    scheduler: str, interval: str, options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = scheduled(scheduler, interval, **options)
    train_coalitions(mine, torch.zeros(1, 3, dtype=torch.bool), 7, compare=True)
    # Where they are not, the coalition of all is no run of all, and no truth is made of it.
    monkeypatch.setattr(CoalitionTraining, "_step_schedules", lambda *_: None)
    with pytest.raises(ConfigurationError, match="the coalition of all clients, trained side by side"):
        make_truth(mine, tmp_path, seeds=[7])


def test_a_schedule_by_a_value_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="ReduceLROnPlateau steps by a value"):
        train_coalitions(scheduled("ReduceLROnPlateau", "epoch"), all_coalitions(3), 0)


def test_a_coalition_does_not_depend_on_those_beside_it() -> None:
    masks, mine = all_coalitions(3), small(performance="negative_loss")
    all_of_them, one = train_coalitions(mine, masks, 3), train_coalitions(mine, masks[5:6], 3)
    assert torch.allclose(all_of_them[5:6], one, rtol=1e-4)


def test_another_seed_is_another_training() -> None:
    masks, mine = all_coalitions(3)[-1:], small(performance="negative_loss")
    assert train_coalitions(mine, masks, 3) != train_coalitions(mine, masks, 4)
