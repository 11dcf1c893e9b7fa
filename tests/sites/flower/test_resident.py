"""A process that lives through a run, and the short ones that hand messages to it: without a SuperLink."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="needs flwr: make flower")

from helpers.sites import processes_of_sites

pytestmark = pytest.mark.flower

# An app that says in which process it is, and for which message of it; some messages it does not survive.
APP = """
import os
from pathlib import Path
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.clientapp import ClientApp

app, seen = ClientApp(), []

@app.train()
def answer(message, context):
    what = message.content["told"]["what"]
    seen.append(what)
    if what == "die":
        os.kill(os.getpid(), 9)
    if what == "die once" and not Path("died").exists():
        Path("died").touch()
        os.kill(os.getpid(), 9)
    if what == "raise":
        raise OSError("the disk is gone")
    context.state["count"] = ConfigRecord({"messages": len(seen)})
    return Message(RecordDict({"said": ConfigRecord({"process": os.getpid(), "seen": seen})}), reply_to=message)
"""

# What Flower does in a process of its own for a message: here in one that is the child of the test's.
MESSAGE = """
import json, os, sys
sys.path.insert(0, os.getcwd())
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.supercore.task_identity import TaskIdentity
from flsv.sites import flower_resident

what, flower_resident.IDLE_SECONDS, run, site = json.loads(sys.argv[1])
node = 5
TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 3, run, node
message = Message(RecordDict({"told": ConfigRecord({"what": what})}), node, "train")
message.metadata.__dict__.update(_message_id="m", _src_node_id=1, _run_id=run)
context = Context(run_id=run, node_id=node, node_config=site, state=RecordDict(), run_config={})
assert "torch" not in sys.modules and "lightning" not in sys.modules
reply = flower_resident.resident("their_app:app")(message, context)
assert (reply.metadata.run_id, reply.metadata.src_node_id, reply.metadata.reply_to_message_id) == (run, node, "m")
said = dict(reply.content["said"])
print(json.dumps({**said, "own": os.getpid(), "count": context.state["count"]["messages"]}))
"""


class Site:
    """Sends messages, each from a process of its own; the process that answers them ends with the test."""

    def __init__(self, folder):
        self.folder = folder
        (folder / "their_app.py").write_text(APP)

    def send(self, name, idle=60, run=1):
        command = self.command(name, idle, run)
        return self.outcome(command)

    def command(self, name, idle=60, run=1):
        """The process of a message."""
        node_config = {"folder": str(self.folder / "site")}
        arguments = json.dumps([name, idle, run, node_config])
        return [sys.executable, "-c", MESSAGE, arguments]

    def outcome(self, command):
        log = self.folder / "log"
        out = self.folder / "out"

        # Files: the process that lives on has them, too, so a pipe would not end.
        with out.open("w") as out_file, log.open("a") as log_file:
            process = subprocess.run(
                command,
                cwd=self.folder,
                stdout=out_file,
                stderr=log_file,
                timeout=600,
            )

        if process.returncode != 0:
            return {"error": log.read_text()}
        return json.loads(out.read_text())

    def socket_of(self, process):
        """The path of a process's socket, which is among the arguments of its command."""
        words = Path(f"/proc/{process}/cmdline").read_bytes().split(b"\0")
        _app, _idle, path, *_ = json.loads(words[-2])
        return path


@pytest.fixture
def site(tmp_path):
    yield Site(tmp_path)
    for process in processes_of_sites(tmp_path):
        os.kill(process, signal.SIGKILL)


def wait_until_gone(pid, seconds=120):
    """Return whether a process ends in time. A child of nobody may stay a zombie, which is an end, too."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        stat = Path(f"/proc/{pid}/stat")
        if not stat.exists():
            return True
        _, _, fields_after_name = stat.read_text().rpartition(")")
        is_zombie = fields_after_name.split()[0] == "Z"
        if is_zombie:
            return True
        time.sleep(0.1)

    return False


def send_bytes(socket_path, content):
    with socket.socket(socket.AF_UNIX) as link:
        link.connect(socket_path)
        link.sendall(content)


def test_one_process_answers_all_messages_of_a_run(site):
    first_reply = site.send("a")
    reply_in_another_run = site.send("b", run=2)
    last_reply = site.send("c")

    assert first_reply["process"] != first_reply["own"]
    assert last_reply["process"] == first_reply["process"]
    assert last_reply["seen"] == ["a", "c"]
    assert last_reply["count"] == 2
    assert reply_in_another_run["seen"] == ["b"]
    processes = {first_reply["process"], reply_in_another_run["process"]}
    assert processes_of_sites(site.folder) == processes


def test_process_survives_an_error_and_what_is_no_message(site):
    process = site.send("a")["process"]
    error = site.send("raise")["error"]
    for content in (b"", b"\x80\x04\x95", b"no pickle"):
        send_bytes(site.socket_of(process), content)

    # Flower sends the server the last line alone.
    *_, last_line = error.splitlines()
    failure = "it failed with an error; the site's own log has the details"
    assert last_line == f"RuntimeError: {failure}"
    assert "the disk is gone" in error
    last_reply = site.send("b")
    assert last_reply["process"] == process
    assert last_reply["seen"] == ["a", "raise", "b"]


def test_folder_that_cannot_be_used_is_named_without_its_path(site):
    (site.folder / "site").touch()

    *_, last_line = site.send("a")["error"].splitlines()

    assert last_line == "RuntimeError: nothing can be written into the site's folder: File exists"


def test_process_answers_only_who_has_the_key_of_its_socket(site):
    process = site.send("a")["process"]
    key_file = site.folder / "site" / "socket.key"
    assert key_file.stat().st_mode & 0o777 == 0o600

    key_file.write_bytes(b"another")
    assert site.send("b")["process"] != process


def test_message_with_an_installation_of_its_own_is_answered_by_its_own_process(site, monkeypatch):
    """Flower deletes after a message what it has installed for it."""
    installation = site.folder / "runtime-envs" / "1" / "lib"
    monkeypatch.setenv(
        "PYTHONPATH",
        str(installation),
        prepend=os.pathsep,
    )

    reply = site.send("a")

    assert reply["process"] == reply["own"]
    assert not processes_of_sites(site.folder)


def test_killed_process_is_replaced(site):
    process = site.send("a")["process"]
    os.kill(process, signal.SIGKILL)
    assert wait_until_gone(process)

    reply = site.send("b")
    assert reply["seen"] == ["b"]
    assert reply["process"] != process


def test_message_at_which_a_process_dies_is_processed_twice_at_most(site):
    assert site.send("die once")["seen"] == ["die once"]
    assert "has died twice while it processed this message" in site.send("die")["error"]
    assert site.send("a")["seen"] == ["a"]


#: What stands between a SuperNode and its messages: the process that it starts.
STARTER = "import subprocess, sys; subprocess.run(sys.argv[1:], check=True)"


def test_second_supernode_in_a_folder_has_a_process_of_its_own(site):
    """So has a SuperNode that is started again, which may have other data. Its process ends with it."""
    first_reply = site.send("a")

    command = site.command("b")
    reply = site.outcome([sys.executable, "-c", STARTER, *command])

    assert reply["seen"] == ["b"]
    assert reply["process"] != first_reply["process"]
    assert wait_until_gone(reply["process"], seconds=30)
    assert site.send("c")["seen"] == ["a", "c"]


def test_resident_process_ends_when_idle(site):
    assert wait_until_gone(site.send("a", idle=1)["process"])
