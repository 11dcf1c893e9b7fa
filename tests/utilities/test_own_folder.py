"""Folders of processes, which others remove after a kill."""

import os
import signal
import time
from pathlib import Path

from flsv.utilities.own_folder import own_folder
from helpers.forked import Forked


def hold_folder(parent: Path) -> None:
    with own_folder(parent) as folder:
        (folder / "file").touch()
        print(folder, flush=True)
        time.sleep(600)


def wait_for_folder(process: Forked) -> Path:
    """Wait until a process prints the folder that it holds."""
    output = ""
    while not output:
        status, output = process.wait(0.02)
        assert not status, "it has ended"
    return Path(output.strip())


def test_folder_of_a_killed_process_is_removed_and_that_of_a_living_one_stays(
    tmp_path,
):
    parent = tmp_path / "place"
    parent.mkdir()
    living = Forked(tmp_path / "living", hold_folder, parent)
    killed = Forked(tmp_path / "killed", hold_folder, parent)

    folder_of_living = wait_for_folder(living)
    wait_for_folder(killed)

    os.kill(killed.pid, signal.SIGKILL)
    killed.wait()
    with own_folder(parent) as folder:
        assert set(parent.iterdir()) == {folder_of_living, folder}
        assert list(parent.rglob("file")) == [folder_of_living / "file"]

    os.kill(living.pid, signal.SIGKILL)
    living.wait()
    with own_folder(parent) as folder:
        assert list(parent.iterdir()) == [folder]

    assert not list(parent.iterdir())
