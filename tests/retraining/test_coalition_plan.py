"""How coalitions are trained: as rows of one batched model, and by fits of their own where rows are none."""

import copy
import re
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
from flsv.training.rows.row_step import RowStep
from helpers import slow_except
from helpers.coalitions_by_hand import ROUNDS, SEED, Draws, Reads, Validates, data, shadow_loop
from helpers.fits import assert_resumes, fit, trainer_for, vector
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


#: What keeps coalitions from being rows, besides the module: a federation that is trained by whole fits.
BY_FITS: dict[str, tuple[str, Any]] = {
    "a game that the aggregator reads": ("evaluate models in every round", lambda: {
        "aggregator": ShapleyWeighted("ssv"), "metrics": {"ssv": SurrogateFederatedShapley()}}),
    "engine": ("clients are rows already", lambda: {"engine": "vmap"}),
    "algorithm": ("client_algorithm=SCAFFOLD", lambda: {
        "client_algorithm": SCAFFOLD(), "module": Plain(network(False), lambda p: torch.optim.SGD(p, lr=0.1))}),
    "reads": ("batched model: vmap", lambda: {"module": Reads(network(batch_norm=False))}),
    "draws": ("draws random numbers by random", lambda: {"module": Draws(network(batch_norm=False))}),
    "validation": ("validation changes 'seen'", lambda: {"module": Validates(network(batch_norm=False))}),
    "hook": ("on_after_backward", lambda: {"module": Twice(network(batch_norm=False))}),
}  # fmt: skip


@pytest.mark.parametrize("what", slow_except(("engine", "reads"), BY_FITS))
def test_coalitions_that_cannot_be_batched_are_trained_by_fits_after_the_run(
    tmp_path: Path, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    match, make = BY_FITS[what]
    options = make()
    module = options.pop("module", None) or Plain(network(batch_norm=False))

    expected = values_by_retraining(tmp_path, module, 2, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        federation = shadow_loop(ShadowShapley(performance="negative_loss"), **options)
        with caplog.at_level("INFO", "lightning.pytorch"):
            fit(federation, tmp_path, module, data(), rounds=2)
    found = federation.contributions["shadow"].double()
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
    said = [text for text in caplog.messages if "trained after the run" in text]
    assert len(said) == 1
    assert "costs 3 more fits" in said[0]
    assert re.search(match, said[0])
    assert "bug report" not in said[0]  # torch's advice to its own developers


class Later(Plain):
    """From the second round on a step of rows is another than that of a client."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        other = self.current_epoch > 0 and type(self.net[0].weight) is not torch.nn.Parameter
        return super().training_step(batch, batch_idx) * (2 if other else 1)


class Stops(Plain):
    """From the second round on no rows of one batched model can take its step."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss if self.current_epoch == 0 or float(loss) < 1e9 else 0 * loss


class Between(Plain):
    """Changes its weights between two rounds."""

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        if self.current_epoch == 1 and batch_idx == 0:
            with torch.no_grad():
                self.net[0].weight.mul_(0.5)
        return super().validation_step(batch, batch_idx)


#: Modules whose rows turn out to be none in the second round.
GIVEN_UP = {"model of a coalition differs by": Later, "calling .item": Stops, "have changed between rounds": Between}


@pytest.mark.parametrize("match", GIVEN_UP)
def test_batched_coalitions_that_fail_their_check_during_the_run_are_replaced_by_fits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, match: str
) -> None:
    """In the midst of training: coalitions are trained by fits when it has ended, and the federation goes on."""
    monkeypatch.setattr("flsv.retraining.coalition_rows.COMPARED", 1)
    module = GIVEN_UP[match](network(batch_norm=False))
    expected = values_by_retraining(tmp_path, module, ROUNDS)
    plain = FederatedLoop(seed=SEED, reporting=Reporting(table=False))
    without = fit(plain, tmp_path, copy.deepcopy(module), data(), ROUNDS)
    federation = shadow_loop(ShadowShapley(performance="negative_loss"))
    with pytest.warns(UserWarning, match=f"trained after the run.*{match}.*Until now they were trained during the run"):
        trained = fit(federation, tmp_path, module, data(), ROUNDS)
    torch.testing.assert_close(federation.contributions["shadow"].double(), expected, rtol=0, atol=1e-6)
    assert torch.equal(vector(trained), vector(without))


def test_batched_coalitions_that_run_out_of_memory_are_trained_in_halves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the random numbers and the buffers of all at once, and a line, once."""
    sizes, derive = [], RowStep._derive

    def with_little_memory(self: RowStep, states: Any, batch: Any) -> Any:
        sizes.append(len(next(iter(states.values()))))
        if sizes[-1] > 2:
            torch.rand(3)  # whatever has been drawn until memory ran out
            raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return derive(self, states, batch)

    def values() -> torch.Tensor:
        federation = shadow_loop(ShadowShapley(performance="negative_loss"))
        fit(federation, tmp_path, Plain(network(dropout=0.3)), data(), rounds=2)
        return federation.contributions["shadow"]

    expected = values()
    monkeypatch.setattr(RowStep, "_derive", with_little_memory)
    with pytest.warns(
        UserWarning, match="a step of 3 coalitions' models at once ran out of memory: from here on 2"
    ) as told:
        found = values()
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
    assert sum("ran out of memory" in str(each.message) for each in told) == 1
    assert sizes.count(3) == 1
    assert {1, 2} <= set(sizes)
    monkeypatch.setattr(RowStep, "_derive", lambda *_: (_ for _ in ()).throw(RuntimeError("CUDA out of memory.")))
    torch.testing.assert_close(values(), expected, rtol=1e-4, atol=1e-6)  # by fits of their own


def test_batched_coalitions_that_differ_from_one_trained_alone_are_replaced_by_fits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the last round, where nothing in between has compared them."""
    monkeypatch.setattr("flsv.retraining.coalition_rows.COMPARED", 10**15)
    module = Later(network(batch_norm=False))
    expected = values_by_retraining(tmp_path, module, ROUNDS)
    federation = shadow_loop(ShadowShapley(performance="negative_loss"))
    with pytest.warns(UserWarning, match="trained after the run.*alone comes to a model that lies"):
        fit(federation, tmp_path, module, data(), ROUNDS)
    torch.testing.assert_close(federation.contributions["shadow"].double(), expected, rtol=0, atol=1e-6)


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
    """By rows, and by fits."""
    net = network(batch_norm=False)
    expected = values_by_retraining(tmp_path, Plain(copy.deepcopy(net)), 2)
    federation = shadow_loop(ShadowShapley(performance="negative_loss"))
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
        federation = shadow_loop(ShadowShapley(performance="negative_loss"))
        trainer_for(federation, tmp_path, 2, callbacks=callbacks).fit(each, data())
        found.append(federation.contributions["shadow"])
    assert torch.equal(*found)


def test_run_that_replaces_batched_coalitions_by_fits_resumes_to_the_bit(tmp_path: Path) -> None:
    def module() -> Plain:
        return Between(network(batch_norm=False))

    whole = assert_resumes(lambda: shadow_loop(ShadowShapley()), tmp_path, module, data)
    assert not whole.contributions["shadow"].isnan().any()


def test_coalitions_too_large_to_be_batched_are_trained_by_fits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flsv.retraining.shadow.MOST_BYTES", 1000)
    module = Plain(network(batch_norm=False))
    expected = values_by_retraining(tmp_path, module, 1)
    federation = shadow_loop(ShadowShapley(performance="negative_loss"))
    fit(federation, tmp_path, module, data(), rounds=1)
    torch.testing.assert_close(federation.contributions["shadow"].double(), expected, rtol=0, atol=1e-6)
