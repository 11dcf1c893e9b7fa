"""Folders of processes, which others remove after a kill."""

import os
import signal
import time
from pathlib import Path

from flsv.utilities.own_files import own_folder
from helpers.forked import Forked


def own(place: Path) -> None:
    with own_folder(place) as folder:
        (folder / "file").touch()
        print(folder, flush=True)
        time.sleep(600)


def test_folder_of_a_killed_process_is_removed_and_that_of_a_living_one_stays(
    tmp_path: Path,
) -> None:
    place = tmp_path / "place"
    place.mkdir()
    living, killed = owners = [Forked(tmp_path / name, own, place) for name in ("living", "killed")]
    while not all(each.wait(0.02)[1] for each in owners):
        assert not any(each.status for each in owners)
    os.kill(killed.pid, signal.SIGKILL)
    killed.wait()
    with own_folder(place) as mine:
        assert {*place.iterdir()} == {Path(living.wait(0)[1].strip()), mine}
        assert [*place.rglob("file")] == [Path(living.wait(0)[1].strip()) / "file"]
    os.kill(living.pid, signal.SIGKILL)
    living.wait()
    with own_folder(place) as mine:
        assert [*place.iterdir()] == [mine]
    assert not [*place.iterdir()]
