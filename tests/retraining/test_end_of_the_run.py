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


@pytest.mark.slow
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


@pytest.mark.slow
def test_one_copy_of_the_run_is_in_memory_at_a_time(tmp_path, monkeypatch):
    """Parts of a copy refer to each other, so that only garbage collection frees it."""
    modules_in_memory = weakref.WeakSet()
    counts_at_loads = []
    load = CopyOfRun.load

    def load_and_count(run_copy):
        trainer, module, data = load(run_copy)
        modules_in_memory.add(module)
        counts_at_loads.append(len(modules_in_memory))
        return trainer, module, data

    monkeypatch.setattr(CopyOfRun, "load", load_and_count)

    fit_valued(tmp_path, Base())

    num_loads_of_dry_run = 2
    counts_at_loads_of_coalitions = counts_at_loads[num_loads_of_dry_run:]
    num_coalitions = 3
    assert len(counts_at_loads_of_coalitions) > num_coalitions
    assert set(counts_at_loads_of_coalitions) == {1}


@pytest.mark.slow
def test_coalitions_make_no_reports_and_checks_of_the_run(tmp_path, monkeypatch):
    calls = []

    def record_calls(owner, method):
        call_method = getattr(owner, method)

        def record_and_call(*arguments, **options):
            calls.append(method)
            return call_method(*arguments, **options)

        monkeypatch.setattr(owner, method, record_and_call)

    methods_of_run = {
        "_result": RunReports,
        "_describe_run": RunReports,
        "__init__": SharedObjectCheck,
    }
    for method, owner in methods_of_run.items():
        record_calls(owner, method)

    fit_valued(tmp_path, Base())

    assert sorted(calls) == sorted(methods_of_run)
