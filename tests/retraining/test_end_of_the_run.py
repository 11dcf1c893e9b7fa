"""Coalitions train when the run has ended: after all of its hooks, and with what these have set free."""

import weakref
from pathlib import Path

import lightning as L
import pytest
import torch

from flsv.retraining.copied_fits import CopyOfRun
from helpers.hidden_state import Base, fit_valued

HOLDERS = []


class HoldsUntilTeardown(Base):
    """Holds something that only one fit of a program may have, such as a port."""

    def setup(self, stage):
        if HOLDERS:
            raise OSError("the port is in use")
        HOLDERS.append(self)

    def teardown(self, stage):
        HOLDERS.clear()
        torch.save(self, "by_module.pt")


class SavesTheModule(L.Callback):
    """Saves the module when a fit ends, with all its attributes."""

    def teardown(
        self,
        trainer,
        pl_module,
        stage,
    ):
        torch.save(pl_module, "by_callback.pt")


@pytest.mark.slow
def test_coalitions_train_after_the_modules_teardown(
    tmp_path,
    monkeypatch,
):
    monkeypatch.chdir(tmp_path)
    module = HoldsUntilTeardown()

    loop = fit_valued(tmp_path, module, callbacks=[SavesTheModule()])

    assert loop.contributions["shadow"].isfinite().all()
    assert "teardown" not in vars(module)
    assert len(module.trainer.callbacks) == 2
    assert Path("by_module.pt").is_file()
    assert Path("by_callback.pt").is_file()


@pytest.mark.slow
def test_one_copy_of_the_run_is_in_memory_at_a_time(tmp_path, monkeypatch):
    """Its parts refer to each other, so that it is there until garbage is collected."""
    references = []
    numbers = []
    load = CopyOfRun.load

    def counted_load(run_copy):
        trainer, module, data = load(run_copy)
        references.append(weakref.ref(module))
        loaded_copies = [reference for reference in references if reference() is not None]
        numbers.append(len(loaded_copies))
        return trainer, module, data

    monkeypatch.setattr(CopyOfRun, "load", counted_load)

    fit_valued(tmp_path, Base())

    _trial, _second_of_trial, *coalitions = numbers
    assert len(coalitions) > 3
    assert set(coalitions) == {1}
