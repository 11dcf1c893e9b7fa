"""Ctrl-C and kills while coalitions are trained: what is trained is kept, and a line says how to do the rest."""

import os
import signal
import warnings

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.callbacks.progress.tqdm_progress import Tqdm

from flsv import Reporting
from flsv.metrics import ShadowShapley
from flsv.retraining.coalition_store import CoalitionStore
from flsv.values.coalition_files import read_settings
from helpers import warns
from helpers.forked import Forked
from helpers.models import loop_of
from helpers.retrained import record_fits, stored_coalitions
from zoo.optimizers import StepsByHand
from zoo.program import Base, fit_valued


@pytest.fixture
def interrupted_after_one(monkeypatch):
    """Ctrl-C once the first client's coalition is trained and stored."""
    add = CoalitionStore.add

    def add_and_interrupt(store, seed, members, models):
        add(store, seed, members, models)
        if len(members) == 1:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(CoalitionStore, "add", add_and_interrupt)
        yield patch


@pytest.mark.fast_rows
@pytest.mark.usefixtures("interrupted_after_one")
@pytest.mark.parametrize(
    ("writes_files", "message"),
    [
        (True, "1 of 3 coalitions .*kept in .*flsv retrain"),
        (False, "1 of 3 coalitions .*none is kept"),
    ],
)
def test_interrupted_trainings_are_kept_and_the_rest_is_named(writes_files, message, tmp_path):
    reporting = Reporting(table=False, files=writes_files)
    with warns(message):
        loop = fit_valued(tmp_path, Base(), loop={"reporting": reporting})

    assert loop.round_index == 2
    assert loop.contributions["shadow"].isnan().all()
    assert "before the coalitions are trained" in repr(loop.contributions["shadow"])
    stored = list(tmp_path.rglob("coalitions.csv"))
    assert len(stored) == writes_files


class LooksForCoalitions(L.Callback):
    """Notes the stored coalitions and the settings in the first round of a fit."""

    def __init__(self, folder):
        self.folder = folder
        self.coalitions = None
        self.settings = None

    def on_train_epoch_end(self, trainer, pl_module):
        if self.coalitions is None:
            self.coalitions = stored_coalitions(self.folder)
            self.settings = read_settings(self.folder / "coalitions")


@pytest.mark.slow
def test_coalitions_of_an_earlier_run_leave_the_folder_when_another_begins(tmp_path):
    checkpoint = tmp_path / "first.ckpt"
    fit_valued(tmp_path, Base(), rounds=1)
    assert stored_coalitions(tmp_path)

    first_look = LooksForCoalitions(tmp_path)
    module = Base()
    fit_valued(tmp_path, module, rounds=1, callbacks=[first_look])
    module.trainer.save_checkpoint(checkpoint)
    second_look = LooksForCoalitions(tmp_path)
    fit_valued(tmp_path, Base(), rounds=2, callbacks=[second_look], ckpt_path=checkpoint)

    assert first_look.coalitions == set()
    assert second_look.coalitions == {(0,), (1,), (2,)}  # of the run that goes on
    assert first_look.settings == second_look.settings


@pytest.mark.slow
def test_bar_counts_the_coalitions_that_are_trained(tmp_path, monkeypatch):
    counts_by_title = {}

    class Bar(Tqdm):
        def close(self):
            counts_by_title[self.desc.strip(": ")] = self.n, self.total
            super().close()

    monkeypatch.setattr("flsv.retraining.progress.Tqdm", Bar)
    monkeypatch.setattr("flsv.retraining.progress._can_redraw", lambda: True)

    fit_valued(tmp_path, Base(), rounds=1, enable_progress_bar=True)

    assert counts_by_title["Groups of clients"] == (3, 3)
    for num_done, total in counts_by_title.values():
        assert num_done == total


class InterruptsItself(StepsByHand):
    """Sends itself Ctrl-C when clients 1 and 2 train alone, if FLSV_TEST_INTERRUPT is set."""

    def training_step(self, batch, batch_idx):
        cohort = loop_of(self).state.cohort
        if os.environ.get("FLSV_TEST_INTERRUPT") and cohort == [1, 2]:
            os.kill(os.getpid(), signal.SIGINT)

        super().training_step(batch, batch_idx)


def fit_with_values(folder, path=None):
    metric = ShadowShapley(coalitions="both", performance="negative_loss")
    saves = ModelCheckpoint(folder / "checkpoints", save_last=True)
    loop = fit_valued(
        folder,
        InterruptsItself(),
        metric=metric,
        callbacks=[saves],
        enable_checkpointing=True,
        ckpt_path=path,
    )

    rows = loop.history().query("metric == 'shadow'")
    sorted_rows = rows.sort_values(["round", "client"])
    return sorted_rows.value.tolist()


def fit_once(folder):
    """Fit, and print the warnings, which the tests' process would record."""
    with warnings.catch_warnings(record=True) as caught_warnings:
        warnings.simplefilter("always")
        fit_with_values(folder)

    for warning in caught_warnings:
        print(warning.message)


@pytest.mark.slow
def test_interrupted_run_resumes_to_the_bit_and_trains_only_the_rest(tmp_path, monkeypatch):
    folder = tmp_path / "ended"
    process = Forked(tmp_path / "process", fit_once, folder, FLSV_TEST_INTERRUPT="1")

    status, output = process.wait()

    # Ctrl-C while coalitions are trained ends these trainings alone: the run is trained.
    assert status == 0, output
    assert "there are no values" in output

    stored_parts = stored_coalitions(folder)
    trained = record_fits(monkeypatch)
    checkpoint = folder / "checkpoints" / "last.ckpt"
    values = fit_with_values(folder, str(checkpoint))

    # The fit of all clients, which the run's comparison trains, is the run's.
    assert stored_parts
    assert not stored_parts & trained
    assert values == fit_with_values(tmp_path / "whole")


class StopsInSecondRound(L.Callback):
    def on_train_epoch_end(self, trainer, pl_module):
        trainer.should_stop = trainer.current_epoch > 0


def fit_with_checkpoints(
    folder,
    every,
    rounds,
    ckpt_path=None,
):
    saves = ModelCheckpoint(folder / "checkpoints", save_last=True)
    loop = fit_valued(
        folder,
        Base(),
        rounds,
        metric=ShadowShapley(coalitions="singles", every=every),
        callbacks=[saves, StopsInSecondRound()],
        enable_checkpointing=True,
        ckpt_path=ckpt_path,
    )
    return loop.contributions["shadow"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("every", "rounds"),
    [(1000, 2), (None, 2), (1000, 5)],
)
def test_interrupted_coalitions_have_values_when_the_fit_is_resumed(
    tmp_path, interrupted_after_one, every, rounds
):
    """Also if no round was due for values but the last, and if the run has stopped early."""
    folder = tmp_path / "run"
    interrupted = fit_with_checkpoints(folder, every, rounds)
    assert interrupted.isnan().all()

    interrupted_after_one.undo()
    checkpoint = folder / "checkpoints" / "last.ckpt"
    resumed = fit_with_checkpoints(folder, every, rounds, checkpoint)

    assert not resumed.isnan().any()
    if rounds == 2:  # else another round is trained
        whole = fit_with_checkpoints(tmp_path / "whole", every, rounds)
        assert torch.equal(resumed, whole)


@pytest.mark.slow
def test_rows_that_a_kill_has_lost_are_trained_again_to_the_bit(tmp_path):
    """Those of the run itself, too."""
    folder = tmp_path / "run"
    whole = fit_with_checkpoints(folder, every=None, rounds=2)
    path = folder / "coalitions.csv"
    content = path.read_bytes()

    for file in folder.glob("coalitions/*/*.pt"):
        file.unlink()
    checkpoint = folder / "checkpoints" / "last.ckpt"
    resumed = fit_with_checkpoints(folder, every=None, rounds=2, ckpt_path=checkpoint)

    assert torch.equal(resumed, whole)
    assert path.read_bytes() == content
