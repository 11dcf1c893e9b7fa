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
from helpers.runs import read_rows

FILES = {".lock", "contributions.csv", "run.json", "clients"}


def fit_run(folder: Path | str | None, **options):
    reporting = Reporting(figures=1, table=False)
    loop = FederatedLoop(
        metrics={"in_run": InRunShapley()}, client_algorithm=InRunValues(), reporting=reporting
    )
    trainer = trainer_for(loop, folder, rounds=1, **options)
    trainer.fit(Plain(network(batch_norm=False)), toy_data(server_val=0.2))


def names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@pytest.mark.slow
def test_run_writes_into_its_named_folder_and_nowhere_else(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    fit_run(".")
    assert names_in(tmp_path) == FILES

    fit_run(None, logger=CSVLogger(".", name="", version="logged"))
    assert names_in(tmp_path) == {*FILES, "logged"}
    assert names_in(tmp_path / "logged") > FILES


def test_run_without_a_folder_writes_nothing_and_ignores_locks(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lock = FolderLock(tmp_path)
    fit_run(None)
    lock.release()

    assert names_in(tmp_path) == {".lock"}


class CallbackThatStartsASecondRun(Callback):
    def __init__(self, folder: Path):
        self.folder = folder
        self.error = ""

    def on_train_epoch_start(self, trainer, module):
        with refused("another run is writing into") as error:
            fit(FederatedLoop(), self.folder)
        self.error = str(error.value)


def test_second_run_in_a_running_runs_folder_is_refused(tmp_path):
    callback = CallbackThatStartsASecondRun(tmp_path)
    fit(FederatedLoop(), tmp_path, rounds=1, callbacks=[callback])

    assert str(tmp_path) in callback.error
    assert "--trainer.default_root_dir" in callback.error
    rows = read_rows(tmp_path / "contributions.csv")
    assert {row["round"] for row in rows} == {"0"}


def lock_and_fork(folder: Path):
    """Lock a folder. The fork outlives a killed parent for a while, as a data loader's worker does."""
    lock = FolderLock(folder)
    read_end, write_end = os.pipe()
    is_child = os.fork() == 0
    if is_child:
        os.write(write_end, b"1")
        time.sleep(60)
        os._exit(0)
    # The child writes when it has released what it has inherited.
    os.read(read_end, 1)
    print("locked", lock, flush=True)
    time.sleep(60)


@pytest.mark.slow
def test_folder_lock_of_a_killed_run_is_released(tmp_path):
    process = Forked(tmp_path / "process", lock_and_fork, tmp_path)
    while "locked" not in process.output.read_text():
        status, output = process.wait(0.1)
        assert status is None, output

    os.kill(process.pid, signal.SIGKILL)
    status, _ = process.wait()
    assert status == -signal.SIGKILL
    FolderLock(tmp_path).release()

    group_of_child = process.pid
    os.killpg(group_of_child, signal.SIGKILL)


@pytest.mark.parametrize("order", [1, -1], ids=["first", "last"])
def test_charts_are_where_tensorboard_writes(tmp_path, order):
    charts = TensorBoardLogger(tmp_path / "charts", name="hospitals")
    tables = CSVLogger(tmp_path / "tables")
    trainer = L.Trainer(logger=[charts, tables][::order], enable_progress_bar=False)

    lines = where_results_are(trainer)

    assert f"Charts:  tensorboard --logdir {tmp_path}/charts/hospitals" in lines
