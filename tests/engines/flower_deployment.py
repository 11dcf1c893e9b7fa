"""A SuperLink and SuperNodes with TLS and authentication, as processes, started by the template's own scripts."""

import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

SITES = ["Boston", "Lyon", "Osaka"]
BIN = Path(sys.executable).parent
SECONDS = 420
ACCEPTED = "SuperNode ID:"  # what a SuperNode says when its SuperLink has let it in


class Deployment:
    """Everything that runs but the server's rounds, in a project of ``flsv init --flower``."""

    def __init__(self, folder: Path, policy: str) -> None:
        self.folder, self._policy = folder, policy
        port, *ports = free_ports(1 + len(SITES))
        self._ports = dict(zip(SITES, ports))
        own = {"FLWR_HOME": str(folder / ".flwr"), "OMP_NUM_THREADS": "1", "PATH": f"{BIN}:{os.environ['PATH']}"}
        self.env = {**os.environ, **own, "SUPERLINK": f"127.0.0.1:{port}", "FLWR_TELEMETRY_ENABLED": "0"}
        self.processes: dict[str, subprocess.Popen] = {}

    def begin(self) -> None:
        self._do("sh", "keys.sh", *SITES)
        (self.folder / "flsv-site.toml").write_text(self._policy)
        self.start_link()
        self._do(sys.executable, "deploy/run.py", "register")
        for site in SITES:
            self.start_site(site)

    def start_link(self) -> None:
        self._start("link", "sh", "deploy/superlink.sh")
        self.wait_for("link", lambda log: "Uvicorn running" in log)

    def start_site(self, site: str, until_accepted: bool = False) -> None:
        """Start a SuperNode; again and again, as a supervisor does it, where the SuperLink thinks that it is there."""
        again = ("sh", "-c", 'until "$@"; do sleep 2; done', "sh") if until_accepted else ()
        more = {"SITE": site, "PORT": str(self._ports[site])}
        self._start(site, *again, "sh", "deploy/supernode.sh", **more)

    def run(self, name: str = "run") -> None:
        """Start the server's rounds; ``name``.log is what they print."""
        self._start(name, "flwr", "run", ".", "federation", "--stream")

    def supervise(self, name: str) -> None:
        """Likewise, by ``run.py``, which starts them again until they are done."""
        self._start(name, sys.executable, "deploy/run.py", STATUS=str(self.folder / "runs" / "status.json"))

    def kill(self, name: str) -> None:
        """SIGKILL, to a process started here and to all that it started."""
        process = self.processes.pop(name)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(20)

    def wait_for(self, name: str, seen: Callable[[str], bool], seconds: float = 150) -> None:
        """Until a log shows it."""
        log, deadline = self.folder / f"{name}.log", time.monotonic() + seconds
        while not seen(log.read_text()):
            assert time.monotonic() < deadline, log.read_text()
            assert self.processes[name].poll() is None or seen(log.read_text()), log.read_text()
            time.sleep(0.2)

    def end(self) -> None:
        for process in self.processes.values():
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
        for process in self.processes.values():
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)

    def _do(self, *command: str) -> None:
        done = subprocess.run(command, cwd=self.folder, env=self.env, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stdout + done.stderr

    def _start(self, name: str, *command: str, **more: str) -> None:
        log = (self.folder / f"{name}.log").open("w")
        self.processes[name] = subprocess.Popen(
            command,
            cwd=self.folder,
            env={**self.env, **more},
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


@contextmanager
def deployment(folder: Path, policy: str) -> Iterator[Deployment]:
    """One that ends all its processes."""
    deployed = Deployment(folder, policy)
    try:
        deployed.begin()
        yield deployed
    finally:
        deployed.end()


def free_ports(count: int) -> list[int]:
    """Below those that a client is given for its end of a connection: a port that is free for a moment, while its
    server is started again, would be taken by one of those who try to reach it."""
    with ExitStack() as stack:
        found: list[int] = []
        for port in random.sample(range(10_000, 30_000), 1000):
            each = stack.enter_context(socket.socket())
            with suppress(OSError):
                each.bind(("127.0.0.1", port))
                found.append(port)
            if len(found) == count:
                return found
    raise OSError("no ports are free")


def living(folder: Path) -> set[int]:
    """The processes that live on for sites below this folder."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):  # it has ended
            line = path.read_bytes()
            if b"flower_resident import _live" in line and str(folder).encode() in line:
                found.add(int(path.parent.name))
    return found
