"""A SuperLink and three SuperNodes with TLS and authentication, as processes, started as the template's README says."""

from __future__ import annotations

import os
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
    """Everything that runs but the server's rounds, which :meth:`run` starts.

    Args:
        folder: of the project that ``flsv init --flower`` made.
        policy: of every site.
    """

    def __init__(self, folder: Path, policy: str = "questions = []\nleast_sites = 3\n") -> None:
        self._policy = policy
        own = {"FLWR_HOME": str(folder / ".flwr"), "OMP_NUM_THREADS": "1", "PATH": f"{BIN}:{os.environ['PATH']}"}
        own["FLWR_SUPEREXEC_TASK_POLL_INTERVAL"] = "0.1"
        self.folder, self.env = folder, {**os.environ, **own}
        self.processes: dict[str, subprocess.Popen] = {}

    def begin(self) -> None:
        self._do(sys.executable, "keys.py", *SITES)
        self._port, *ports = free_ports(1 + len(SITES))
        self._ports = dict(zip(SITES, ports))
        config = self.folder / ".flwr" / "config.toml"
        config.write_text(config.read_text().replace("127.0.0.1:8000", f"127.0.0.1:{self._port}"))
        tls = ["--ssl-ca-certfile", "keys/ca.pem", "--ssl-certfile", "keys/server.pem"]
        tls += ["--ssl-keyfile", "keys/server.key"]
        link = ("flower-superlink", "--port", str(self._port), *tls, "--enable-supernode-auth")
        self._start("link", *link, "--disable-runtime-dependency-installation")
        self.wait_for("link", lambda log: "Uvicorn running" in log)
        for site in SITES:
            self._do("flwr", "supernode", "register", f"keys/{site}.pub", "trial")
            self.start_site(site)

    def start_site(self, site: str, until_accepted: bool = False) -> None:
        """Start a SuperNode.

        Args:
            site: its name.
            until_accepted: again and again, as a supervisor does it: the SuperLink refuses one that it thinks is there.
        """
        node = ("flower-supernode", "--superlink", f"127.0.0.1:{self._port}", "--root-certificates", "keys/ca.pem")
        key = ("--auth-supernode-private-key", f"keys/{site}")
        policy = self.folder / "site.toml"
        policy.write_text(self._policy)
        config = ("--node-config", f'site="{site}" folder="{self.folder}/sites" policy="{policy}"')
        command = (*node, *key, "--port", str(self._ports[site]), *config)
        again = ("sh", "-c", 'until "$@"; do sleep 2; done', "sh") if until_accepted else ()
        self._start(site, *again, *command)

    def run(self, name: str = "run") -> None:
        """Start the server's rounds; ``name``.log is what they print."""
        self._start(name, "flwr", "run", ".", "trial", "--stream")

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

    def _start(self, name: str, *command: str) -> None:
        log = (self.folder / f"{name}.log").open("w")
        self.processes[name] = subprocess.Popen(
            command, cwd=self.folder, env=self.env, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )


@contextmanager
def deployment(folder: Path, *policy: str) -> Iterator[Deployment]:
    """One that ends all its processes."""
    deployed = Deployment(folder, *policy)
    try:
        deployed.begin()
        yield deployed
    finally:
        deployed.end()


def free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
