"""Coalitions train when the run has ended: after all of its hooks, and with what these have set free."""

import weakref
from pathlib import Path

import lightning as L
import pytest
import torch

from flsv.federation.reports import RunReports
from flsv.retraining.copied_fits import CopyOfRun
from flsv.training.local_training import SharedObjectCheck
from zoo.program import Base, fit_valued

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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("owner", "method"),
    [
        (RunReports, "_result"),
        (RunReports, "_describe_run"),
        (SharedObjectCheck, "__init__"),
    ],
)
def test_fit_of_a_coalition_makes_nothing_that_only_the_run_shows(
    owner,
    method,
    tmp_path,
    monkeypatch,
):
    calls = []
    method_of_run = getattr(owner, method)

    def counted_method(*arguments, **options):
        calls.append(method)
        return method_of_run(*arguments, **options)

    monkeypatch.setattr(owner, method, counted_method)

    fit_valued(tmp_path, Base())

    assert calls == [method]
