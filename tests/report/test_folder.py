"""Where a run writes, whether it does, and that one run at a time does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import CSVLogger
from toys import Plain, fit, network, toy_data, trainer_for

from flsv import Reporting
from flsv.clients.algorithms import InRunValues
from flsv.errors import ConfigurationError
from flsv.loop import FederatedLoop
from flsv.metrics import InRunShapley
from flsv.report.folder import FolderLock

FILES = {".lock", "contributions.csv", "run.json", "clients"}


def run(folder: Path | str | None, **options: Any) -> None:
    metrics = {"in_run": InRunShapley()}
    loop = FederatedLoop(
        metrics=metrics, client_algorithm=InRunValues(), reporting=Reporting(figures=1, table=False), seed=1
    )
    trainer = trainer_for(loop, folder, rounds=1, **options)  # type: ignore[arg-type]
    trainer.fit(Plain(network(batch_norm=False)), toy_data(server_val=0.2))


def test_nothing_is_left_in_a_working_folder_that_was_not_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    held = FolderLock(tmp_path)  # nobody else is kept out of it either
    run(None)
    run(None)
    held.release()
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]


@pytest.mark.parametrize("folder", [".", "given"])
def test_a_folder_that_was_given_is_written_into(folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run(folder)
    assert {path.name for path in (tmp_path / folder).iterdir()} == FILES


def test_a_loggers_folder_is_written_into(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run(None, logger=CSVLogger(".", name="", version="logged"))
    assert {path.name for path in tmp_path.iterdir()} == {"logged"}
    assert {path.name for path in (tmp_path / "logged").iterdir()} > FILES


HOLD = """
import os, sys, time
from pathlib import Path
from flsv.report.folder import FolderLock
lock = FolderLock(Path(sys.argv[1]))
if os.fork() == 0:  # as a data loader's worker, which outlives a killed parent for a while
    time.sleep(60)
    os._exit(0)
print("held", flush=True)
time.sleep(60)
"""


class Second(Callback):
    """Starts another run in the same folder in the middle of this one."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.error = folder, ""

    def on_train_epoch_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        with pytest.raises(ConfigurationError, match="another run is writing into") as error:
            fit(FederatedLoop(), self.folder)
        self.error = str(error.value)


def test_a_second_run_in_a_live_runs_folder_is_refused(tmp_path: Path) -> None:
    second = Second(tmp_path)
    fit(FederatedLoop(), tmp_path, rounds=1, callbacks=[second])
    assert str(tmp_path) in second.error
    assert "--trainer.default_root_dir" in second.error
    assert len({line.split(",")[0] for line in (tmp_path / "contributions.csv").read_text().splitlines()}) == 2


@pytest.mark.slow
def test_the_folder_of_a_killed_run_is_free(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parent.parent,
        start_new_session=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    with pytest.raises(ConfigurationError, match="another run is writing into"):
        FolderLock(tmp_path)
    process.send_signal(signal.SIGKILL)
    process.wait()
    FolderLock(tmp_path).release()
    os.killpg(process.pid, signal.SIGKILL)  # its child
    process.stdout.close()
