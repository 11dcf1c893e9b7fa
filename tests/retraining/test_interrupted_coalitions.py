"""Ctrl-C and kills while coalitions are trained: what is trained is kept, and a line says how to do the rest."""

import os
import signal
import warnings
from contextlib import contextmanager
from functools import partial

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from flsv import Reporting
from flsv.metrics import ShadowShapley
from flsv.retraining import at_once, price
from flsv.retraining.coalition_store import CoalitionStore
from flsv.retraining.copied_fits import fit_quietly
from flsv.retraining.price import PriceList
from flsv.utilities.stop_signals import Terminated
from flsv.values.coalition_files import read_settings
from helpers import warns
from helpers.data import toy_data
from helpers.fits import StopInRound, make_loop_of_three_clients, trainer_for
from helpers.forked import Forked
from helpers.models import Plain, loop_of
from helpers.retrained import record_fits, stored_coalitions
from zoo.optimizers import StepsByHand
from zoo.program import Base, fit_valued


@contextmanager
def ctrl_c_after_first_client_alone():
    """Interrupt fits within once the first client's coalition is trained and stored."""
    add = CoalitionStore.add

    def add_and_interrupt(store, seed, members, models):
        add(store, seed, members, models)
        if len(members) == 1:
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CoalitionStore, "add", add_and_interrupt)
        yield


@pytest.mark.fast_rows
@pytest.mark.parametrize(
    ("writes_files", "message", "num_tables"),
    [
        (True, "1 of 3 coalitions .*kept in .*flsv retrain", 1),
        (False, "1 of 3 coalitions .*none is kept", 0),
    ],
)
def test_interrupted_trainings_are_kept_and_the_rest_is_named(
    writes_files, message, num_tables, tmp_path
):
    reporting = Reporting(table=False, files=writes_files)
    with ctrl_c_after_first_client_alone(), warns(message):
        loop = fit_valued(tmp_path, Base(), loop={"reporting": reporting})

    values = loop.values["shadow"]
    assert loop.round_index == 2
    assert values.overall.isnan().all()
    assert "1 of 3 coalitions" in values.missing
    assert len(list(tmp_path.rglob("coalitions.csv"))) == num_tables


class CallbackThatReadsTheStoreInTheFirstRound(L.Callback):
    """Reads which coalitions are stored, and their settings, when the first round of a fit ends."""

    def __init__(self, folder):
        self.folder = folder
        self.coalitions = None
        self.settings = None

    def on_train_epoch_end(self, trainer, pl_module):
        if self.coalitions is None:
            self.coalitions = stored_coalitions(self.folder)
            self.settings = read_settings(self.folder / "coalitions")


@pytest.mark.slow
def test_run_removes_the_coalitions_of_an_earlier_run_unless_it_resumes_it(tmp_path):
    single_clients = {(0,), (1,), (2,)}
    fit_valued(tmp_path, Base(), rounds=1)
    assert stored_coalitions(tmp_path) == single_clients

    new_run = CallbackThatReadsTheStoreInTheFirstRound(tmp_path)
    module = Base()
    fit_valued(tmp_path, module, rounds=1, callbacks=[new_run])
    checkpoint = tmp_path / "first.ckpt"
    module.trainer.save_checkpoint(checkpoint)

    resumed_run = CallbackThatReadsTheStoreInTheFirstRound(tmp_path)
    fit_valued(tmp_path, Base(), rounds=2, callbacks=[resumed_run], ckpt_path=checkpoint)

    assert new_run.coalitions == set()
    assert resumed_run.coalitions == single_clients
    assert new_run.settings == resumed_run.settings


def fit_and_return_values(folder, module, *, rounds=2, metric=None, callbacks=(), resumes=False):
    """A fit that resumes goes on from the last checkpoint in the folder."""
    checkpoints = folder / "checkpoints"
    loop = fit_valued(
        folder,
        module,
        rounds,
        metric=metric,
        callbacks=[ModelCheckpoint(checkpoints, save_last=True), *callbacks],
        enable_checkpointing=True,
        ckpt_path=checkpoints / "last.ckpt" if resumes else None,
    )
    return loop.contributions["shadow"]


class ModuleThatSendsCtrlC(StepsByHand):
    """Sends SIGINT to its process when clients 1 and 2 train alone, if FLSV_TEST_INTERRUPT is set."""

    def training_step(self, batch, batch_idx):
        cohort = loop_of(self).state.cohort
        if os.environ.get("FLSV_TEST_INTERRUPT") and cohort == [1, 2]:
            os.kill(os.getpid(), signal.SIGINT)

        super().training_step(batch, batch_idx)


def fit_and_value_pairs(folder, resumes=False):
    metric = ShadowShapley(coalitions="both", performance="negative_loss")
    return fit_and_return_values(folder, ModuleThatSendsCtrlC(), metric=metric, resumes=resumes)


def fit_and_print_warnings(folder):
    with warnings.catch_warnings(record=True) as caught_warnings:
        warnings.simplefilter("always")
        fit_and_value_pairs(folder)

    for warning in caught_warnings:
        print(warning.message)


@pytest.mark.slow
def test_ctrl_c_in_coalitions_ends_no_run_and_resuming_trains_the_rest(
    tmp_path, monkeypatch, caplog
):
    folder = tmp_path / "run"
    process = Forked(tmp_path / "process", fit_and_print_warnings, folder, FLSV_TEST_INTERRUPT="1")
    status, output = process.wait()
    assert status == 0, output
    assert "there are no values" in output
    coalitions_of_first_fit = stored_coalitions(folder)
    assert coalitions_of_first_fit

    coalitions_trained_from_now_on = record_fits(monkeypatch)
    with caplog.at_level("INFO", "lightning.pytorch"):
        resumed_values = fit_and_value_pairs(folder, resumes=True)

    # This fit has run no round by which it could say how long coalitions take.
    assert not any("takes about" in message for message in caplog.messages)
    assert coalitions_trained_from_now_on.isdisjoint(coalitions_of_first_fit)
    assert torch.equal(resumed_values, fit_and_value_pairs(tmp_path / "whole"))


class CallbackThatStopsAfterRound1(L.Callback):
    def on_train_epoch_end(self, trainer, pl_module):
        trainer.should_stop = trainer.current_epoch >= 1


def fit_to_an_unplanned_end(folder, resumes=False):
    """Stop five rounds after two, of which only the last one has values."""
    return fit_and_return_values(
        folder,
        Base(),
        rounds=5,
        metric=ShadowShapley(coalitions="singles", every=10),
        callbacks=[CallbackThatStopsAfterRound1()],
        resumes=resumes,
    )


@pytest.mark.slow
def test_interrupted_coalitions_of_a_stopped_run_have_values_when_it_is_resumed(tmp_path):
    with ctrl_c_after_first_client_alone():
        interrupted_values = fit_to_an_unplanned_end(tmp_path)
    resumed_values = fit_to_an_unplanned_end(tmp_path, resumes=True)

    assert interrupted_values.isnan().all()
    assert resumed_values.isfinite().all()


@pytest.mark.slow
def test_lost_files_of_coalitions_are_trained_again_to_the_bit(tmp_path):
    values = fit_and_return_values(tmp_path, Base())
    table_path = tmp_path / "coalitions.csv"
    table = table_path.read_text()
    table_path.unlink()
    for file in tmp_path.glob("coalitions/*/*.pt"):
        file.unlink()

    resumed_values = fit_and_return_values(tmp_path, Base(), resumes=True)

    assert torch.equal(resumed_values, values)
    assert table_path.read_text() == table


@pytest.mark.parametrize("error", [KeyboardInterrupt, Terminated])
def test_error_of_a_signal_in_a_copys_fit_stays_the_same(tmp_path, error):
    stop = StopInRound(round_index=0, batch=0, error=error)
    trainer = trainer_for(make_loop_of_three_clients(), tmp_path, callbacks=[stop])

    with pytest.raises(KeyboardInterrupt) as raised:
        fit_quietly(trainer, Plain(), toy_data())

    assert type(raised.value) is error


def interrupt_the_second_fit(monkeypatch):
    """Interrupt the second fit that trains coalitions at once. Return a list with an entry for each of these fits."""
    fits = []
    fit_at_once = at_once.fit_at_once

    def fit_or_interrupt(*arguments, **options):
        fits.append(options["coalitions"])
        if len(fits) == 2:
            raise KeyboardInterrupt
        return fit_at_once(*arguments, **options)

    monkeypatch.setattr(at_once, "fit_at_once", fit_or_interrupt)
    return fits


@pytest.mark.slow
def test_interrupted_groups_that_train_at_once_are_resumed_to_the_same_values(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(PriceList, "at_once", lambda prices, masks: 0.0)
    monkeypatch.setattr(price, "MAX_ELEMENTS_OF_GROUP", 1)  # a group for each coalition
    make_metric = partial(ShadowShapley, coalitions="all")
    expected_values = fit_and_return_values(tmp_path / "whole", Base(), metric=make_metric())

    fits = interrupt_the_second_fit(monkeypatch)
    folder = tmp_path / "stopped"
    with warns("interrupted: .* 3 of 6 coalitions are trained"):  # two witnesses, and one group
        stopped_values = fit_and_return_values(folder, Base(), metric=make_metric())
    values = fit_and_return_values(folder, Base(), metric=make_metric(), resumes=True)

    assert stopped_values.isnan().all()
    assert torch.equal(values, expected_values)
    assert len(fits) == 2 + 3  # the group that was stored is not trained again
