"""Coalitions train when the run has ended: after all of its hooks, and with what these have set free."""

import weakref
from pathlib import Path

import lightning as L
import pytest
import torch

from flsv.federation.reports import RunReports
from flsv.retraining.copied_fits import CopyOfRun
from flsv.training.local_training import SharedObjectCheck
from helpers import record_calls
from zoo.program import Base, fit_valued

pytestmark = pytest.mark.slow

PORT_HOLDERS = []


class ModuleThatHoldsAPortUntilTeardown(Base):
    """Refuses a second fit before the first one's teardown, as a module with a port does."""

    def setup(self, stage):
        if PORT_HOLDERS:
            raise OSError("the port is in use")
        PORT_HOLDERS.append(self)

    def teardown(self, stage):
        PORT_HOLDERS.clear()
        torch.save(self, "by_module.pt")


class CallbackThatSavesTheModuleInTeardown(L.Callback):
    def teardown(self, trainer, pl_module, stage):
        torch.save(pl_module, "by_callback.pt")


def test_coalitions_train_after_the_modules_teardown(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    module = ModuleThatHoldsAPortUntilTeardown()
    callback = CallbackThatSavesTheModuleInTeardown()

    loop = fit_valued(tmp_path, module, callbacks=[callback])

    assert loop.contributions["shadow"].isfinite().all()
    # What flsv waits for the end of the run by is gone, also when teardown saves the module.
    is_teardown_replaced = "teardown" in vars(module)
    assert not is_teardown_replaced
    assert set(module.trainer.callbacks) == {loop, callback}
    assert Path("by_module.pt").is_file()
    assert Path("by_callback.pt").is_file()


@pytest.fixture
def counts_at_loads(monkeypatch):
    """How many loaded modules are in memory, noted whenever a copy of the run is loaded."""
    modules_in_memory = weakref.WeakSet()
    counts = []
    load = CopyOfRun.load

    def load_and_count(run_copy):
        trainer, module, data = load(run_copy)
        modules_in_memory.add(module)
        counts.append(len(modules_in_memory))
        return trainer, module, data

    monkeypatch.setattr(CopyOfRun, "load", load_and_count)
    return counts


def test_one_copy_of_the_run_is_in_memory_at_a_time(tmp_path, counts_at_loads):
    """Parts of a copy refer to each other, so that only garbage collection frees it."""
    fit_valued(tmp_path, Base())

    num_loads_of_dry_run = 2
    counts_at_loads_of_coalitions = counts_at_loads[num_loads_of_dry_run:]
    num_coalitions = 3
    assert len(counts_at_loads_of_coalitions) > num_coalitions
    assert set(counts_at_loads_of_coalitions) == {1}


def test_coalitions_make_no_reports_and_checks_of_the_run(tmp_path, monkeypatch):
    results = record_calls(monkeypatch, RunReports, "_result")
    descriptions = record_calls(monkeypatch, RunReports, "_describe_run")
    checks = record_calls(monkeypatch, SharedObjectCheck, "__init__")

    fit_valued(tmp_path, Base())

    calls_of_the_run = 1
    assert len(results) == len(descriptions) == len(checks) == calls_of_the_run
