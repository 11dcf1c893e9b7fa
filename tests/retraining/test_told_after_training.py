"""What is seen after training is told beside the values: in a warning, in run.json and in the verdict."""

import ctypes
import sys
import tempfile
from importlib import import_module

import lightning as L
import pytest
import torch

from flsv.metrics import ShadowShapley
from flsv.results import open_run
from flsv.results.round_result import UNLIKE_RUN
from flsv.results.verdict import inputs_of_events
from flsv.retraining import coalition_refusals
from flsv.retraining.coalition_refusals import is_of_tool
from flsv.retraining.price import PriceList
from helpers import refused, warns
from zoo.program import Base, fit_valued, make_mlp, make_mlp_with_norm

#: A counter outside of all Python objects, which is in no copy of a run.
COUNTER_IN_C = ctypes.c_long(0)


def count_in_c():
    COUNTER_IN_C.value += 1
    return COUNTER_IN_C.value


class ModuleWithLossByCounterInC(Base):
    """Its loss grows with the number of its steps in this process."""

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) * (1 + 0.02 * count_in_c())


@pytest.mark.slow
def test_training_by_a_counter_in_c_has_values_and_the_verdict_doubts_them(tmp_path):
    with warns("another model than the run"):
        loop = fit_valued(tmp_path, ModuleWithLossByCounterInC())

    assert loop.contributions["shadow"].isfinite().all()
    events = open_run(tmp_path).record["events"]
    event_of_model, event_of_updates = events
    assert event_of_model.what == event_of_updates.what == UNLIKE_RUN
    assert "the coalition of all clients" in event_of_model.text
    assert "clients train otherwise" in event_of_updates.text
    inputs_of_verdict = inputs_of_events(events, ["0", "1", "2"])
    assert event_of_model.text in inputs_of_verdict["unlike_run"]


class ModuleThatTrainsItsLastLayerInTheRunOnly(Base):
    """Trains in the second fit of the process: the first one is the dry run, the others are coalitions."""

    def __init__(self):
        super().__init__(make_mlp)
        first_layer, _relu, _last_layer = self.net
        first_layer.requires_grad_(False)

    def on_fit_start(self):
        COUNTER_IN_C.value += 1

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        is_run = COUNTER_IN_C.value == 2
        return loss if is_run else 0 * loss


class ModuleThatTrainsOtherwiseInCopiesFromRound3On(Base):
    """Has another loss in copies of the run. The first fit of the process is the dry run, the second one the run."""

    make_network = staticmethod(make_mlp)

    def __init__(self):
        super().__init__(self.make_network)

    def on_fit_start(self):
        COUNTER_IN_C.value += 1

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        is_copy = COUNTER_IN_C.value > 2
        return 1.05 * loss if is_copy and self.current_epoch >= 2 else loss


class TheSameWhereRoundingErrorsGrow(ModuleThatTrainsOtherwiseInCopiesFromRound3On):
    make_network = staticmethod(make_mlp_with_norm)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), 0.01)


class AndOtherwiseInRows(ModuleThatTrainsOtherwiseInCopiesFromRound3On):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        is_in_row = torch._C._functorch.maybe_current_level() is not None
        return 1.1 * loss if is_in_row and self.current_epoch >= 2 else loss


@pytest.mark.by_turn
@pytest.mark.slow
@pytest.mark.parametrize(
    "make_module",
    [
        ModuleThatTrainsOtherwiseInCopiesFromRound3On,
        TheSameWhereRoundingErrorsGrow,
        AndOtherwiseInRows,
    ],
)
def test_copies_that_differ_from_the_run_are_told_whichever_way_coalitions_train(
    make_module, monkeypatch, tmp_path
):
    COUNTER_IN_C.value = 0
    monkeypatch.setattr(PriceList, "at_once", lambda prices, masks: 0.0)
    with warns("trained once more for 4 rounds, came to another model than the run"):
        fit_valued(tmp_path, make_module(), rounds=4, metric=ShadowShapley(coalitions="all"))


@pytest.mark.slow
def test_warning_says_how_far_the_grand_coalitions_model_is_from_the_runs(tmp_path):
    COUNTER_IN_C.value = 0
    # A coalition's model stays at the start: the distance is 100 % of the run's way.
    whole_way = r"1e\+02 % of the way"
    weight_of_last_layer = r"'net\.2\.weight'"

    with warns(rf"\({whole_way} .*, first in {weight_of_last_layer}"):
        fit_valued(tmp_path, ModuleThatTrainsItsLastLayerInTheRunOnly())


#: A callback that writes the number of each round into an open file.
CALLBACK_OF_A_TOOL = """
import os
import lightning as L

class Reports(L.Callback):
    def __init__(self, descriptor):
        self.report = lambda number: os.write(descriptor, f"{number}\\n".encode())

    def on_train_epoch_end(self, trainer, pl_module):
        self.report(trainer.current_epoch)
"""
METADATA = "Metadata-Version: 2.1\nName: searches-rates\nVersion: 1.0\nRequires-Dist: {}"


class CallbackOfTheProgram(L.Callback):
    pass


def install_package_of_callback(folder, requirement):
    """Install a package ``searches_rates``, which needs another package, into a folder."""
    metadata = folder / "searches_rates-1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(METADATA.format(requirement))
    (metadata / "top_level.txt").write_text("searches_rates")
    (folder / "searches_rates.py").write_text(CALLBACK_OF_A_TOOL)


def import_callback(folder, monkeypatch):
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, "searches_rates", raising=False)
    return import_module("searches_rates").Reports


@pytest.mark.by_turn
@pytest.mark.slow
@pytest.mark.parametrize(
    ("requirement", "options", "takes_part"),
    [
        ("alembic>=1.5", {}, False),
        ("alembic>=1.5", {"excluded_callbacks": []}, True),
        ("torch>=2.0", {}, True),
        ("torch>=2.0", {"excluded_callbacks": ["Reports"]}, False),
    ],
)
def test_callback_takes_part_in_coalitions_if_its_package_needs_torch(
    requirement, options, takes_part, tmp_path, monkeypatch
):
    install_package_of_callback(tmp_path / "packages", requirement)
    callback_class = import_callback(tmp_path / "packages", monkeypatch)
    metric = ShadowShapley(coalitions="singles", **options)

    # Files that coalitions open are restored after them. This one is open before.
    with tempfile.TemporaryFile() as reports:
        callback = callback_class(reports.fileno())
        fit_valued(tmp_path / "run", Base(), rounds=2, metric=metric, callbacks=[callback])
        reports.seek(0)
        reported_rounds = reports.read().split()

    rounds_of_run = [b"0", b"1"]
    has_reports_of_coalitions = reported_rounds != rounds_of_run
    assert has_reports_of_coalitions == takes_part


def test_callback_of_the_program_costs_no_search_of_installed_packages(monkeypatch):
    monkeypatch.setattr(coalition_refusals, "packages_distributions", None)

    assert not is_of_tool(CallbackOfTheProgram())


def test_excluded_callback_that_the_trainer_has_not_is_refused(tmp_path):
    with refused("Trainer has no callback 'Note'"):
        fit_valued(tmp_path, Base(), metric=ShadowShapley(excluded_callbacks=["Note"]))


class ModuleWithLossByStepsOfTheRound(Base):
    """Its loss shrinks with the number of steps of all clients in this round."""

    def on_train_epoch_start(self):
        COUNTER_IN_C.value = 0

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss / (1 + 0.1 * count_in_c())


@pytest.mark.slow
def test_state_that_passes_between_clients_is_told_with_clients_and_parameter(tmp_path):
    """The grand coalition has the model of the run, since each round begins anew."""
    with warns(r"that of the run: 1 \(net.0.weight\), 2 \("):
        fit_valued(tmp_path, ModuleWithLossByStepsOfTheRound())

    (event,) = open_run(tmp_path).record["events"]
    assert event.what == UNLIKE_RUN
    assert "1 (net.0.weight)" in event.text
