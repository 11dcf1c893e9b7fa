"""Where a run writes, whether it does, and that one run at a time does."""

import os
import signal
import time
from pathlib import Path

import lightning as L
import pytest
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

from flsv import Reporting
from flsv.contrib import InRunShapley, InRunValues
from flsv.federation import FederatedLoop
from flsv.results.folder import where_results_are
from flsv.utilities.atomic_files import FolderLock
from helpers import refused
from helpers.data import toy_data
from helpers.fits import fit, trainer_for
from helpers.forked import Forked
from helpers.models import Plain, network

FILES = {".lock", "contributions.csv", "run.json", "clients"}


def fit_run(folder: Path | str | None, **options):
    reporting = Reporting(figures=1, table=False)
    loop = FederatedLoop(
        metrics={"in_run": InRunShapley()}, client_algorithm=InRunValues(), reporting=reporting
    )
    trainer = trainer_for(loop, folder, rounds=1, **options)
    trainer.fit(Plain(network(batch_norm=False)), toy_data(server_val=0.2))


def test_run_writes_into_its_named_folder_and_nowhere_else(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lock = FolderLock(tmp_path)  # nobody else is kept out of it either
    fit_run(None)
    lock.release()

    assert names_in(tmp_path) == {".lock"}

    fit_run(".")
    assert names_in(tmp_path) == FILES

    fit_run(None, logger=CSVLogger(".", name="", version="logged"))
    assert names_in(tmp_path) == {*FILES, "logged"}
    assert names_in(tmp_path / "logged") > FILES


def names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


class StartsASecondRun(Callback):
    def __init__(self, folder: Path):
        self.folder = folder
        self.error = ""

    def on_train_epoch_start(self, trainer, module):
        with refused("another run is writing into") as error:
            fit(FederatedLoop(), self.folder)
        self.error = str(error.value)


def test_a_second_run_in_a_live_runs_folder_is_refused(tmp_path):
    second = StartsASecondRun(tmp_path)
    fit(FederatedLoop(), tmp_path, rounds=1, callbacks=[second])

    assert str(tmp_path) in second.error
    assert "--trainer.default_root_dir" in second.error
    lines = (tmp_path / "contributions.csv").read_text().splitlines()
    first_column = {line.split(",")[0] for line in lines}
    assert first_column == {"round", "0"}  # one header, and rows of the first run's only round


def hold(folder: Path):
    lock = FolderLock(folder)
    read_end, write_end = os.pipe()
    if os.fork() == 0:  # as a data loader's worker, which outlives a killed parent for a while
        os.write(write_end, b"1")
        time.sleep(60)
        os._exit(0)
    os.read(read_end, 1)  # what is done at a fork is done in the child
    print("held", lock, flush=True)
    time.sleep(60)


@pytest.mark.slow
def test_folder_lock_of_a_killed_run_is_released(tmp_path):
    process = Forked(tmp_path / "process", hold, tmp_path)
    while "held" not in process.output.read_text():
        assert process.wait(0.1)[0] is None
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait()[0] == -signal.SIGKILL
    FolderLock(tmp_path).release()
    os.killpg(process.pid, signal.SIGKILL)  # its child


@pytest.mark.parametrize("is_first", [True, False])
def test_charts_are_where_tensorboard_writes(tmp_path, is_first):
    charts = TensorBoardLogger(tmp_path / "charts", name="hospitals")
    loggers = [charts, CSVLogger(tmp_path / "tables")]
    if not is_first:
        loggers.reverse()

    trainer = L.Trainer(logger=loggers, enable_progress_bar=False)
    lines = where_results_are(trainer)

    assert f"Charts:  tensorboard --logdir {tmp_path}/charts/hospitals" in lines
