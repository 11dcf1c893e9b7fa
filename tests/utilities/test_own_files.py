"""Folders of processes, which others remove after a kill."""

import os
import signal
import subprocess
import sys
from pathlib import Path

from flsv.utilities.own_files import own_folder

OWNER = """
import sys, time
from pathlib import Path
from flsv.utilities.own_files import own_folder
with own_folder(Path(sys.argv[1])) as folder:
    (folder / "file").touch()
    print(folder, flush=True)
    time.sleep(600)
"""


def test_folder_of_a_killed_process_is_removed_and_that_of_a_living_one_stays(tmp_path: Path) -> None:
    command = [sys.executable, "-c", OWNER, str(tmp_path)]
    living, killed = (subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2))
    folders = [Path((each.stdout or sys.stdin).readline().strip()) for each in (living, killed)]
    os.kill(killed.pid, signal.SIGKILL)
    killed.wait()
    with own_folder(tmp_path) as mine:
        assert {*tmp_path.iterdir()} == {folders[0], mine}
        assert (folders[0] / "file").is_file()
    living.kill()
    living.wait()
    with own_folder(tmp_path) as mine:
        assert [*tmp_path.iterdir()] == [mine]
    assert not [*tmp_path.iterdir()]
