"""Coalitions of federations with special settings and modules: their fits against fits of the members alone."""

import copy
import warnings
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback

from flsv import FederatedLoop, Reporting
from flsv.aggregation import ShapleyWeighted
from flsv.functional import exact_shapley
from flsv.metrics import ShadowShapley, SurrogateFederatedShapley
from flsv.retraining.retrained_utility import RetrainedUtility
from flsv.sampling import FixedCohort
from flsv.training.algorithms import SCAFFOLD
from helpers import slow_except
from helpers.coalitions_by_hand import SEED, Draws, Reads, Validates, data, shadow_loop
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


#: Federations whose coalitions' rounds are not those of plain FedAvg, and modules that are not plain networks.
SPECIAL: dict[str, Any] = {
    "a game that the aggregator reads": lambda: {
        "aggregator": ShapleyWeighted("ssv"), "metrics": {"ssv": SurrogateFederatedShapley()}},
    "engine": lambda: {"engine": "vmap"},
    "algorithm": lambda: {
        "client_algorithm": SCAFFOLD(), "module": Plain(network(False), lambda p: torch.optim.SGD(p, lr=0.1))},
    "reads": lambda: {"module": Reads(network(batch_norm=False))},
    "draws": lambda: {"module": Draws(network(batch_norm=False))},
    "validation": lambda: {"module": Validates(network(batch_norm=False))},
    "hook": lambda: {"module": Twice(network(batch_norm=False))},
    "weights change between rounds": lambda: {"module": Between(network(batch_norm=False))},
}  # fmt: skip


class Between(Plain):
    """Changes its weights between two rounds."""

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        if self.current_epoch == 1 and batch_idx == 0:
            with torch.no_grad():
                self.net[0].weight.mul_(0.5)
        return super().validation_step(batch, batch_idx)


@pytest.mark.parametrize("what", slow_except(("engine", "reads"), SPECIAL))
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


class Calls(Plain):
    """Trains by a function that holds the module, as a loss with a log may."""

    def __init__(self, net: torch.nn.Module, reads: bool) -> None:
        super().__init__(net)
        self.reads = reads
        self.step = lambda batch: Plain.training_step(self, batch, 0)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = self.step(batch)
        return loss if not self.reads or float(loss) < 1e9 else 0 * loss


@pytest.mark.parametrize("reads", [False, True])
def test_shadow_values_of_a_module_with_bound_functions_equal_retraining(tmp_path: Path, reads: bool) -> None:
    net = network(batch_norm=False)
    expected = values_by_retraining(tmp_path, Plain(copy.deepcopy(net)), 2)
    federation = shadow_loop(ShadowShapley(coalitions="all", performance="negative_loss"))
    fit(federation, tmp_path, Calls(net, reads), data(), rounds=2)
    torch.testing.assert_close(federation.contributions["shadow"].double(), expected, rtol=1e-4, atol=1e-5)


def test_callbacks_that_hold_the_module_act_on_coalitions_models(tmp_path: Path) -> None:
    def clamps(module: L.LightningModule) -> L.Callback:
        def clamp(*_: Any) -> None:
            for parameter in module.parameters():
                parameter.data.clamp_(-0.2, 0.2)

        return LambdaCallback(on_train_batch_end=clamp)

    module, other = (Plain(network(batch_norm=False)) for _ in range(2))
    other.load_state_dict(module.state_dict())
    other.on_train_batch_end = clamps(other).on_train_batch_end  # type: ignore[method-assign]
    found = []
    for each, callbacks in ((module, [clamps(module)]), (other, [])):
        federation = shadow_loop(ShadowShapley(coalitions="all", performance="negative_loss"))
        trainer_for(federation, tmp_path, 2, callbacks=callbacks).fit(each, data())
        found.append(federation.contributions["shadow"])
    assert torch.equal(*found)
