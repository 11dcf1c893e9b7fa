"""What goes wrong at sites and at the server, with real processes: nothing of it stops the federation."""

import csv
import os
import signal

import pytest

pytest.importorskip("flwr", reason="needs flwr: make flower")

from flsv.cli import main
from helpers.sites import ACCEPTED, NAMES, start_deployment

pytestmark = pytest.mark.flower
ROUNDS = 7
TIMEOUT = 60  # beside what a site's first contact took: it imports torch then, which takes a busy machine its time

# What the project's file is given besides: sites that do wrong in a round each, and a server that keeps a diary.
TROUBLE = """
import os
import time
from pathlib import Path

from flsv.engines.flower import from_record, to_record
from flsv.engines.remote import RemoteServer, SiteClient
from flwr.app import Message, RecordDict
from flwr.clientapp import ClientApp


def trouble(message, context, call_next):
    packet = from_record(message.content)
    what = (context.node_config["site"], packet.plain.get("round")) if packet.kind == "train" else None
    if what == ("Lyon", 1):
        return Message(content=RecordDict(), reply_to=message)
    if what == ("Osaka", 2):
        time.sleep(TIMEOUT + 120)
    if what == ("Lyon", 3):
        raise OSError("the disk is gone")
    reply = call_next(message, context)
    if what == ("Boston", 2):
        answer = from_record(reply.content)
        answer.tensors["vector"][0] = float("nan")
        return Message(content=to_record(answer), reply_to=message)
    return reply


class Diary(L.Callback):
    def on_train_epoch_start(self, trainer, pl_module) -> None:
        # The last two wait until Osaka is back: the SuperLink lets it in once it misses the one that was killed.
        until = time.monotonic() + 900
        while trainer.current_epoch == ROUNDS - 2 and not Path("osaka_is_back").exists() and time.monotonic() < until:
            time.sleep(0.2)

    def on_train_epoch_end(self, trainer, pl_module) -> None:
        with Path("diary.txt").open("a") as book:
            book.write(f"{os.getpid()} {trainer.current_epoch}\\n")


right = client_app(SiteClient(make_module, SiteData, make_loop))
client = ClientApp(mods=[trouble])
for register in (client.train(), client.query(), client.evaluate()):
    register(lambda message, context: right(message, context))
server = server_app(
    RemoteServer(
        make_module, make_loop, SITES, rounds=ROUNDS, num_classes=10, folder=FOLDER, timeout=TIMEOUT,
        trainer={"callbacks": [Diary()]},
    )
)
"""


def diary(folder):
    """Who served which round: process and round."""
    book = folder / "diary.txt"
    lines = book.read_text().splitlines() if book.is_file() else []
    return [
        (
            int(line.split()[0]),
            int(line.split()[1]),
        )
        for line in lines
    ]


def test_deployment_survives_misspelt_names_failing_sites_and_kills(tmp_path):
    """One deployment. A name that is misspelt at the server and policies with a typo end the first start by name; then
    sites do wrong, a SuperNode, the server and the SuperLink are killed, and the rounds go on to their end."""
    folder = tmp_path / "app"
    assert (
        main(
            [
                "init",
                "--flower",
                str(folder),
                "--quiet",
            ]
        )
        == 0
    )

    project = folder / "fedapp" / "federation.py"
    written = project.read_text()
    project.write_text(written.replace('SITES = ["Boston"', 'SITES = ["Bostn"'))

    with start_deployment(folder, "question = []\n") as processes:
        for site in NAMES:
            processes.wait_for(site, lambda log: ACCEPTED in log)
        processes.run("refused")
        words = (
            "a node is registered as 'Boston', which is not in sites=['Bostn', 'Lyon', 'Osaka']",
            f"cannot take part: its policy {folder}/flsv-site.toml cannot be read: SitePolicy() got",
        )
        # Some 20 s where the machine has nothing else to do; the server waits 600 s for its sites.
        processes.wait_for(
            "refused",
            lambda log: all(reason in log for reason in words),
        )

        (folder / "flsv-site.toml").write_text("functions = []\n")
        settings = f"\nROUNDS, TIMEOUT, FOLDER = {ROUNDS}, {TIMEOUT}, {str(folder / 'runs')!r}\n"
        settings += f"os.chdir({str(folder)!r})\n"
        project_with_trouble = TROUBLE.replace("\n\ndef trouble", settings + "\n\ndef trouble")
        project.write_text(written.split("client = client_app")[0] + project_with_trouble)
        processes.supervise("rounds")
        processes.wait_for(
            "rounds",
            lambda _: (diary(folder) or [(0, 0)])[-1][1] >= 3,
        )
        processes.kill("Osaka")
        os.kill(
            diary(folder)[-1][0],
            signal.SIGKILL,
        )
        processes.start_site("Osaka", until_accepted=True)
        processes.wait_for("Osaka", lambda log: ACCEPTED in log)
        processes.wait_for(
            "rounds",
            lambda _: diary(folder)[-1][1] == ROUNDS - 3,
        )
        processes.kill("link")
        processes.start_link()
        (folder / "osaka_is_back").touch()
        processes.wait_for("rounds", lambda log: "the run has finished" in log)
        log_text = (folder / "rounds.log").read_text()

    with (folder / "runs" / "contributions.csv").open() as file:
        rows = list(csv.DictReader(file))

    weighed = [set() for _ in range(ROUNDS)]
    for row in rows:
        if row["metric"] == "weight":
            weighed[int(row["round"])].add(NAMES[int(row["client"])])

    assert weighed[0] == {"Boston", "Lyon", "Osaka"}
    assert weighed[1] == {"Boston", "Osaka"}
    assert weighed[2] == {"Lyon"}
    assert "Lyon" not in weighed[3]
    # Killed, refused for as long as the SuperLink thinks that it is there, let in, and a part of the federation again.
    assert weighed[ROUNDS - 1] == {"Boston", "Lyon", "Osaka"}
    assert {index for _, index in diary(folder)} == set(range(ROUNDS))
    assert len({process for process, _ in diary(folder)}) == 3
    assert log_text.count("it is started again") >= 2
    # What is said of round 3 reaches the log some seconds later, and may be lost with the server that is killed then.
    for words in (
        "'Lyon' (client 1) is excluded in round 2",
        "'Osaka' (client 2) is excluded in round 3",
    ):
        assert words in log_text
    assert f"no reply within {TIMEOUT} s" in log_text

    # Absence is not a zero: a site that was excluded has no row of that round, and keeps its values.
    values_of_lyon = [row for row in rows if row["metric"] == "cssv" and row["client"] == "1"]
    assert "1" not in {row["round"] for row in values_of_lyon}
