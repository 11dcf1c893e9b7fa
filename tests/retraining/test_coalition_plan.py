"""Coalitions of federations with special settings and modules: their fits against fits of the members alone."""

import copy
import warnings
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch

from flsv import FederatedLoop, Reporting
from flsv.aggregation import ShapleyWeighted
from flsv.functional import exact_shapley
from flsv.metrics import ShadowShapley, SurrogateFederatedShapley
from flsv.retraining.retrained_utility import RetrainedUtility
from flsv.sampling import FixedCohort
from flsv.training.algorithms import SCAFFOLD
from helpers import slow_except
from helpers.coalitions_by_hand import SEED, data, shadow_loop
from helpers.fits import fit, trainer_for, vector
from helpers.models import Plain, network


def values_by_retraining(folder: Path, module: L.LightningModule, rounds: int, **options: Any) -> torch.Tensor:
    def alone(cohort: FixedCohort) -> L.Trainer:
        federation = shadow_loop(**copy.deepcopy(options)).replace(sampler=cohort, metrics=options.get("metrics"))
        return trainer_for(federation, folder, rounds)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return exact_shapley(RetrainedUtility(alone, module, data(), "negative_loss"), 3).values


class Twice(Plain):
    """Steps by something that batched training does not know."""

    def on_after_backward(self) -> None:
        for parameter in self.parameters():
            parameter.grad *= 2


#: Federations whose coalitions' rounds are not those of plain FedAvg.
SPECIAL: dict[str, Any] = {
    "a game that the aggregator reads": lambda: {
        "aggregator": ShapleyWeighted("ssv"), "metrics": {"ssv": SurrogateFederatedShapley()}},
    "engine": lambda: {"engine": "vmap"},
    "algorithm": lambda: {
        "client_algorithm": SCAFFOLD(), "module": Plain(network(False), lambda p: torch.optim.SGD(p, lr=0.1))},
    "hook": lambda: {"module": Twice(network(batch_norm=False))},
}  # fmt: skip


@pytest.mark.parametrize("what", slow_except(("engine", "hook"), SPECIAL))
def test_values_of_special_federations_equal_those_of_fits_of_the_members(tmp_path: Path, what: str) -> None:
    options = SPECIAL[what]()
    module = options.pop("module", None) or Plain(network(batch_norm=False))
    expected = values_by_retraining(tmp_path, module, 2, **options)
    plain = FederatedLoop(seed=SEED, reporting=Reporting(table=False), **copy.deepcopy(options))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        without = fit(plain, tmp_path, copy.deepcopy(module), data(), rounds=2)
        federation = shadow_loop(ShadowShapley(coalitions="all", performance="negative_loss"), **options)
        trained = fit(federation, tmp_path, module, data(), rounds=2)
    torch.testing.assert_close(federation.contributions["shadow"].double(), expected, rtol=0, atol=1e-6)
    assert torch.equal(vector(trained), vector(without))


def test_cost_of_coalitions_is_said_before_the_first_round(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    logged: dict[str, Any] = {"performance": "val_acc", "mode": "max"}
    said = []
    for options in ({}, {"coalitions": "both"}, {"coalitions": "all"}, {"coalitions": [[0], [1, 2]]}, logged):
        caplog.clear()
        with caplog.at_level("INFO", "lightning.pytorch"):
            fit(shadow_loop(ShadowShapley(**options)), tmp_path, Plain(network(batch_norm=False)), data(), rounds=1)
        (line,) = (text for text in caplog.messages if "trained after the run, each by a fit of its own," in text)
        said.append(line)
    assert "each of 3 clients alone is trained" in said[0]
    assert "costs 1 more fit and 3 models' validations. The others' outputs are predicted." in said[0]
    assert "6 coalitions are trained" in said[1]
    assert "costs 3 more fits" in said[1]
    assert said[2].endswith("costs 3 more fits and 6 models' validations.")
    assert "to predict outputs, train each client alone" in said[3]
    assert "logged values have no outputs" in said[4]
