"""Values of programs as people start them: with a log beside the script, without a terminal, in cells."""

import ast
import runpy
import shlex
import subprocess
import sys

import pytest

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
trainer = L.Trainer(max_epochs=3, callbacks=[loop], accelerator="cpu", enable_progress_bar=False)
trainer.fit(module, data)
values = loop.contributions["value"].tolist()
print("values", values)
"""
)
RETRAINED = (
    MODULE_AND_DATA
    + """
trainer = L.Trainer(max_epochs=2, callbacks=[FederatedLoop(seed=0)], accelerator="cpu", logger=False)
for jobs in (1, 2):
    with joblib.parallel_config(n_jobs=jobs):
        table = flsv.retrain(trainer, module, data, "singles", seeds=1)
    print("values", table["value"].tolist())
"""
)
PYTHON = shlex.quote(sys.executable)
#: As a notebook runs cells, of whose classes there is no file.
CELLS = """for cell in open("train.py").read().split("\\n\\n\\n"): exec(cell)"""
COMMANDS = {
    "from the standard input": f"{PYTHON} - < train.py > output.log 2>&1",
    "in cells": f"{PYTHON} -c '{CELLS}' > output.log 2>&1",
}


@pytest.fixture(scope="module")
def expected_values(tmp_path_factory):
    folder = tmp_path_factory.mktemp("in_this_process")
    script = folder / "train.py"
    script.write_text(FITTED)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(sys, "argv", ["train.py"])
        return runpy.run_path(str(script))["values"]


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_program_has_the_same_values_however_it_is_started(tmp_path, expected_values, name):
    (tmp_path / "train.py").write_text(FITTED)
    subprocess.run(COMMANDS[name], shell=True, cwd=tmp_path, check=True)
    log = (tmp_path / "output.log").read_text()

    assert printed_values(log) == [expected_values]
    assert "came to another model" not in log
    # What coalitions print stays out of the log: the run has three rounds of 27 batches.
    assert log.count("a batch of") < 100


def printed_values(log):
    """The values in each line of them."""
    lines = [line for line in log.splitlines() if line.startswith("values ")]
    return [ast.literal_eval(line.removeprefix("values ")) for line in lines]


@pytest.mark.slow
def test_workers_have_the_classes_of_a_program(tmp_path):
    """They are new processes, as on Windows."""
    (tmp_path / "train.py").write_text(RETRAINED)
    command = [sys.executable, "train.py"]
    process = subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True)
    values, values_of_workers = printed_values(process.stdout)

    assert values_of_workers == values
    assert len(set(values)) == 3
