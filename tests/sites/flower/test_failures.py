"""A server, a site and a SuperLink are killed, with real processes: nothing of it stops the federation."""

import csv
import os
import signal

import pytest

pytest.importorskip("flwr", reason="needs flwr: make flower")

from flsv.cli import main
from helpers.sites import ACCEPTED, start_deployment

pytestmark = pytest.mark.flower
ROUNDS = 5

# A server's callback in the project's file, with the project's folder.
DIARY = """
import os
import time
from pathlib import Path


class Diary(L.Callback):
    folder = Path(FOLDER)

    def on_train_epoch_start(self, trainer, pl_module) -> None:
        # The last two wait until Osaka is back: the SuperLink lets it in once it misses the one that was killed.
        is_back = self.folder / "osaka_is_back"
        until = time.monotonic() + 900
        while trainer.current_epoch == ROUNDS - 2 and not is_back.exists() and time.monotonic() < until:
            time.sleep(0.2)

    def on_train_epoch_end(self, trainer, pl_module) -> None:
        with (self.folder / "diary.txt").open("a") as book:
            book.write(f"{os.getpid()} {trainer.current_epoch}\\n")


"""


def write_project(folder):
    """Write the template's project, with more rounds and a diary of its server."""
    assert main(["init", "--flower", str(folder), "--quiet"]) == 0
    path = folder / "fedapp" / "federation.py"
    changes = {
        "ROUNDS = 3": f"ROUNDS = {ROUNDS}",
        "client = client_app(": DIARY.replace("FOLDER", repr(str(folder))) + "client = client_app(",
        'folder="runs"': f'folder="{folder}/runs", trainer={{"callbacks": [Diary()]}}',
    }
    text = path.read_text()
    for old_text, new_text in changes.items():
        assert old_text in text
        text = text.replace(old_text, new_text)
    path.write_text(text)


def read_diary(folder):
    """Return who served which round: ``[(process, round)]``."""
    book = folder / "diary.txt"
    lines = book.read_text().splitlines() if book.is_file() else []
    entries = []
    for line in lines:
        process, round_index = line.split()
        entries.append((int(process), int(round_index)))
    return entries


@pytest.mark.long
def test_deployment_survives_kills_of_a_site_the_server_and_the_superlink(tmp_path):
    folder = tmp_path / "app"
    write_project(folder)

    def last_round(_=None):
        rounds = [round_index for _, round_index in read_diary(folder)]
        return max(rounds, default=-1)

    with start_deployment(folder, "functions = []\n") as processes:
        processes.supervise("rounds")
        processes.wait_for("rounds", lambda _: last_round() >= 0)
        processes.kill("Osaka")
        server_process, _ = read_diary(folder)[-1]
        os.kill(server_process, signal.SIGKILL)
        processes.start_site("Osaka", until_accepted=True)
        processes.wait_for("Osaka", lambda log: ACCEPTED in log)
        processes.wait_for("rounds", lambda _: last_round() == ROUNDS - 3)
        processes.kill("link")
        processes.start_link()
        (folder / "osaka_is_back").touch()
        processes.wait_for("rounds", lambda log: "the run has finished" in log)
        log_text = (folder / "rounds.log").read_text()

    diary = read_diary(folder)
    assert {round_index for _, round_index in diary} == set(range(ROUNDS))
    assert len({process for process, _ in diary}) == 3
    assert log_text.count("it is started again") >= 2

    with (folder / "runs" / "contributions.csv").open() as file:
        rows = list(csv.DictReader(file))
    weighed_clients = [set() for _ in range(ROUNDS)]
    for row in rows:
        if row["metric"] == "weight":
            weighed_clients[int(row["round"])].add(row["client"])
    assert weighed_clients[0] == {"0", "1", "2"}
    # Osaka was refused for as long as the SuperLink thought that it was there. It is a part of the federation again.
    assert weighed_clients[-1] == {"0", "1", "2"}
