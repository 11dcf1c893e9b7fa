"""Values of programs as people start them: with a log beside the script, without a terminal, in cells."""

import ast
import runpy
import sys
from types import ModuleType

import pytest

from helpers.forked import Forked

#: The module is a class of the program, and a lambda makes its optimizer. Nothing is guarded by ``__name__``.
MODULE_AND_DATA = """
import sys

import joblib
import lightning as L
import torch

import flsv
from flsv import ClassifierClient, FederatedDataModule, FederatedLoop
from flsv.data import SizePartitioner, Splits
from flsv.metrics import ShadowShapley

torch.set_num_threads(1)


class OwnModule(ClassifierClient):
    def training_step(self, batch, batch_index):
        print("a batch of", len(batch[1]))
        return super().training_step(batch, batch_index)


L.seed_everything(0)
data = FederatedDataModule(
    "digits", SizePartitioner([1, 2, 3]), batch_size=64, splits=Splits(server_val=0.1)
)
module = OwnModule("softmax", optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1))
"""
FITTED = (
    MODULE_AND_DATA
    + """
metric = ShadowShapley(performance="negative_loss")
loop = FederatedLoop(metrics={"value": metric})
trainer = L.Trainer(max_epochs=1, callbacks=[loop], accelerator="cpu", enable_progress_bar=False)
trainer.fit(module, data)
values = loop.contributions["value"].tolist()
print("values", values)
"""
)
RETRAINED = (
    MODULE_AND_DATA
    + """
trainer = L.Trainer(max_epochs=1, callbacks=[FederatedLoop(seed=0)], accelerator="cpu", logger=False)
num_workers = int(sys.argv[1])
with joblib.parallel_config(n_jobs=num_workers):
    values = flsv.retrain(trainer, module, data, "singles", seeds=1)["value"].tolist()
print("values", values)
"""
)


def run_as_main(program, file=None):
    """Run a program as Python's main module, of whose classes there is a file only if ``file`` names it."""
    main_module = ModuleType("__main__")
    if file is not None:
        main_module.__file__ = file
    sys.modules["__main__"] = main_module
    exec(compile(program, file or "<stdin>", "exec"), main_module.__dict__)


def run_from_the_standard_input(program):
    """As ``python - < train.py`` does."""
    run_as_main(program)


def run_in_cells(program):
    """As a notebook does, cell by cell."""
    run_as_main("")
    for cell in program.split("\n\n\n"):
        exec(cell, sys.modules["__main__"].__dict__)


def run_with_two_workers(program):
    """As ``python train.py 2`` does."""
    sys.argv = ["train.py", "2"]
    run_as_main(program, file="train.py")


#: Of clients with 4, 7 and 11 batches, in one round. What coalitions print stays out of the log.
NUM_BATCHES_OF_RUN = 4 + 7 + 11


def values_in_this_process(folder, monkeypatch, program, *arguments):
    script = folder / "train.py"
    script.write_text(program)
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", ["train.py", *arguments])
    return runpy.run_path(str(script))["values"]


def read_printed_values(log):
    (line,) = [line for line in log.splitlines() if line.startswith("values ")]
    return ast.literal_eval(line.removeprefix("values "))


@pytest.mark.slow
@pytest.mark.parametrize("run", [run_from_the_standard_input, run_in_cells])
def test_program_has_the_same_values_however_it_is_started(tmp_path, monkeypatch, run):
    expected_values = values_in_this_process(tmp_path, monkeypatch, FITTED)

    status, log = Forked(tmp_path, run, FITTED).wait()

    assert status == 0, log
    assert read_printed_values(log) == expected_values
    assert "came to another model" not in log
    assert log.count("a batch of") == NUM_BATCHES_OF_RUN


@pytest.mark.slow
@pytest.mark.long
def test_new_worker_processes_have_the_classes_of_a_program(tmp_path, monkeypatch):
    expected_values = values_in_this_process(tmp_path, monkeypatch, RETRAINED, "1")

    status, log = Forked(tmp_path, run_with_two_workers, RETRAINED).wait()

    assert status == 0, log
    values = read_printed_values(log)
    assert values == expected_values
    assert len(set(values)) == 3
