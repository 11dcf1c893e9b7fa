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

    loop = fit_valued(tmp_path, module, callbacks=[CallbackThatSavesTheModuleInTeardown()])

    assert loop.contributions["shadow"].isfinite().all()
    assert "teardown" not in vars(module)
    assert len(module.trainer.callbacks) == 2
    assert Path("by_module.pt").is_file()
    assert Path("by_callback.pt").is_file()


@pytest.mark.slow
def test_one_copy_of_the_run_is_in_memory_at_a_time(tmp_path, monkeypatch):
    """Parts of a copy refer to each other, so that only garbage collection frees it."""
    module_references = []
    copies_in_memory = []
    load = CopyOfRun.load

    def load_and_count(run_copy):
        trainer, module, data = load(run_copy)
        module_references.append(weakref.ref(module))
        is_in_memory = [reference() is not None for reference in module_references]
        copies_in_memory.append(sum(is_in_memory))
        return trainer, module, data

    monkeypatch.setattr(CopyOfRun, "load", load_and_count)

    fit_valued(tmp_path, Base())

    num_loads_of_dry_run = 2
    copies_in_memory_of_coalitions = copies_in_memory[num_loads_of_dry_run:]
    assert len(copies_in_memory_of_coalitions) > 3
    assert set(copies_in_memory_of_coalitions) == {1}


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
