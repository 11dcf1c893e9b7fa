"""Two live runs in one folder are refused; what a killed run held is free."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import lightning as L
import pytest
from lightning.pytorch.callbacks import Callback
from toys import fit

from flsv.errors import ConfigurationError
from flsv.loop import FederatedLoop
from flsv.report.folder import FolderLock

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
