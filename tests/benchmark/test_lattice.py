"""All coalitions side by side: what RetrainedUtility comes to, which trains them one after the other."""

from __future__ import annotations

from pathlib import Path

import lightning as L
import pytest
import torch
from small_federation import small

from flsv import FederatedLoop
from flsv.benchmark import Federation, train_coalitions
from flsv.errors import ConfigurationError
from flsv.functional.shapley.exact import all_coalitions
from flsv.games.retraining import RetrainedUtility
from flsv.sampling import FixedCohort
from flsv.seeding import seed_global_rngs


def retrained(small: Federation, tmp_path: Path, seed: int, metric: str) -> RetrainedUtility:
    def trainer(cohort: FixedCohort) -> L.Trainer:
        loop = FederatedLoop(sampler=cohort, seed=seed, attacks=small.attackers(), print_table=False)
        made = small.trainer(loop)
        return made

    return RetrainedUtility(trainer, small.module(), small.datamodule(), metric)


@pytest.mark.parametrize("optimizer", ["SGD", "Adam"])
def test_the_same_as_one_coalition_after_the_other(tmp_path: Path, optimizer: str) -> None:
    model = dict(small().model["init_args"]) | {
        "optimizer": {"class_path": f"torch.optim.{optimizer}", "init_args": {"lr": 0.02}}
    }
    mine = small(model={"class_path": "flsv.ClassifierClient", "init_args": model}, local_epochs=1)
    masks = all_coalitions(3)
    together = train_coalitions(mine, masks, seed=7)
    seed_global_rngs(7, "benchmark")
    apart = retrained(mine, tmp_path, 7, "negative_loss")(masks)
    assert torch.allclose(-together["loss"], apart, rtol=1e-4, atol=1e-5)
    assert apart.unique().numel() == 8 - 1 + (apart[4] != apart[0]).item()  # the coalitions do differ
    assert together["utility"].min() >= 0


def test_a_coalition_does_not_depend_on_those_beside_it() -> None:
    masks = all_coalitions(3)
    all_of_them, one = train_coalitions(small(), masks, 3), train_coalitions(small(), masks[5:6], 3)
    assert torch.allclose(all_of_them["loss"][5:6], one["loss"], rtol=1e-4)


def test_another_seed_is_another_training() -> None:
    masks = all_coalitions(3)[-1:]
    assert train_coalitions(small(), masks, 3)["loss"] != train_coalitions(small(), masks, 4)["loss"]


def test_batch_norm_is_refused() -> None:
    args = {"network": "resnet34_small", "optimizer": {"class_path": "torch.optim.SGD", "init_args": {"lr": 0.1}}}
    with pytest.raises(ConfigurationError, match="RetrainedUtility"):
        train_coalitions(small(model={"class_path": "flsv.ClassifierClient", "init_args": args}), all_coalitions(3), 0)
