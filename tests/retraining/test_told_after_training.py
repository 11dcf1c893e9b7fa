"""What is seen after training is told beside the values: in a warning, in run.json and in the verdict."""

import ctypes
import os
import sys
import tempfile
from importlib import import_module
from pathlib import Path

import pytest
import torch

from flsv.metrics import ShadowShapley
from flsv.results import open_run
from flsv.results.round_result import UNLIKE_RUN
from flsv.results.verdict import inputs_of_events
from helpers import refused, warns
from zoo.program import Base, fit_valued


class CountsInC(Base):
    """Its loss grows with its steps, which are counted where no copy and no snapshot is made."""

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) * (1 + 0.02 * count_by_c_memory())


@pytest.mark.slow
def test_training_by_what_nothing_copies_has_values_and_the_verdict_says_why_to_doubt_them(
    tmp_path,
):
    with warns("another model than the run"):
        loop = fit_valued(tmp_path, CountsInC())

    assert loop.contributions["shadow"].isfinite().all()
    run = open_run(tmp_path)
    of_twin, of_first_updates = run.record["events"]
    assert of_twin.what == of_first_updates.what == UNLIKE_RUN
    assert "the coalition of all clients" in of_twin.text
    assert "clients train otherwise" in of_first_updates.text
    inputs = inputs_of_events(run.record["events"], ["0", "1", "2"])
    assert of_twin.text in inputs["unlike_run"]


class OnlyTheRun(Base):
    """Trains in the second fit only, that of the run, which follows a trial."""

    def on_fit_start(self):
        STEPS_IN_C.value += 1

    def training_step(self, batch, batch_idx):
        is_run = STEPS_IN_C.value == 2
        return super().training_step(batch, batch_idx) * is_run


@pytest.mark.slow
def test_doubt_says_how_far_from_the_run_the_twin_is_and_in_what(tmp_path):
    STEPS_IN_C.value = 0
    module = OnlyTheRun()
    module.net[0].requires_grad_(False)
    module.net[1] = torch.nn.Identity()

    with warns(r"\(1e\+02 % of the way .*, first in 'net\.3\.weight'"):
        fit_valued(tmp_path, module)


TOOL = """
import os
import lightning as L

class Reports(L.Callback):
    def __init__(self, descriptor):
        self.report = lambda number: os.write(descriptor, f"{number}\\n".encode())

    def on_train_epoch_end(self, trainer, pl_module):
        self.report(trainer.current_epoch)
"""


def install_package(folder, requirement):
    """Install a package ``searches_rates``, which needs another package, into a folder."""
    (folder / "searches_rates.py").write_text(TOOL)
    metadata = folder / "searches_rates-1.0.dist-info"
    metadata.mkdir()
    lines = ["Metadata-Version: 2.1", "Name: searches-rates", "Version: 1.0"]
    lines.append(f"Requires-Dist: {requirement}")
    (metadata / "METADATA").write_text("\n".join(lines))
    (metadata / "top_level.txt").write_text("searches_rates")


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
def test_callback_of_a_tool_takes_no_part_in_coalitions(
    requirement,
    options,
    takes_part,
    tmp_path,
    monkeypatch,
):
    """A package that searches settings, and is not about training, is told of the run alone."""
    packages = tmp_path / "packages"
    packages.mkdir()
    install_package(packages, requirement)
    monkeypatch.syspath_prepend(packages)
    monkeypatch.delitem(sys.modules, "searches_rates", raising=False)
    reports = import_module("searches_rates")
    metric = ShadowShapley(coalitions="singles", **options)
    with tempfile.TemporaryFile() as study:  # it is open, so that coalitions write into it
        callback = reports.Reports(study.fileno())
        fit_valued(tmp_path / "run", Base(), metric=metric, callbacks=[callback])
        study.seek(0)
        is_told_of_coalitions = study.read() != b"0\n1\n"

    assert is_told_of_coalitions == takes_part


def test_callback_that_is_not_there_cannot_be_left_out(tmp_path):
    with refused("Trainer has no callback 'Note'"):
        fit_valued(tmp_path, Base(), metric=ShadowShapley(excluded_callbacks=["Note"]))


def count_by_environment():
    number = int(os.environ["FLSV_STEPS"]) + 1
    os.environ["FLSV_STEPS"] = str(number)
    return number


def count_by_c_memory():
    STEPS_IN_C.value += 1
    return STEPS_IN_C.value


def count_by_file():
    path = Path("steps.txt")
    with path.open("a") as file:
        file.write(".")
    return path.stat().st_size


def forget_steps():
    os.environ["FLSV_STEPS"] = "0"
    STEPS_IN_C.value = 0
    Path("steps.txt").unlink(missing_ok=True)


STEPS_IN_C = ctypes.c_long(0)


class Counts(Base):
    """Trains by the number of a round's steps, which it does not hold itself."""

    def __init__(self, counter):
        super().__init__()
        self.count = counter

    def on_train_epoch_start(self):
        forget_steps()

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss / (1 + 0.1 * self.count())


@pytest.mark.slow
@pytest.mark.parametrize("counter", [count_by_environment, count_by_c_memory, count_by_file])
def test_what_passes_from_client_to_client_within_a_round_is_told_with_clients_and_entry(
    tmp_path, monkeypatch, counter
):
    """The twin comes to the model of the run: each round forgets what the last one has counted."""
    monkeypatch.chdir(tmp_path)
    module = Counts(counter)
    with warns(r"that of the run: 1 \(net.0.weight\), 2 \("):
        fit_valued(tmp_path / "run", module)
    forget_steps()

    (event,) = open_run(tmp_path / "run").record["events"]
    assert event.what == UNLIKE_RUN
    assert "1 (net.0.weight)" in event.text
