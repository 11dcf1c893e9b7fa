"""A SuperLink and three SuperNodes with TLS and authentication, as the template's README starts them."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import lightning as L
import pytest
import torch

pytest.importorskip("flwr", reason="needs pip install 'flsv[flower]'")

from flwr.app import RecordDict

from flsv import FederatedDataModule, FederatedLoop
from flsv.cli import main
from flsv.data import GroupPartitioner
from flsv.engines.flower import client_app
from flsv.engines.flower.client import site_name
from flsv.engines.flower.records import from_record, to_record
from flsv.engines.remote import Packet
from flsv.errors import ConfigurationError

pytestmark = pytest.mark.flower
SITES = ["Boston", "Lyon", "Osaka"]
BIN = Path(sys.executable).parent
SECONDS = 420


def free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


@contextmanager
def deployment(folder: Path) -> Iterator[dict[str, str]]:
    """Everything that runs but the server's rounds; ends all processes."""
    own = {"FLWR_HOME": str(folder / ".flwr"), "OMP_NUM_THREADS": "1", "PATH": f"{BIN}:{os.environ['PATH']}"}
    env = {**os.environ, **own}
    processes: list[subprocess.Popen] = []

    def start(name: str, *command: str) -> None:
        log = (folder / f"{name}.log").open("w")
        processes.append(subprocess.Popen(command, cwd=folder, env=env, stdout=log, stderr=subprocess.STDOUT))

    def run(*command: str) -> None:
        done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stdout + done.stderr

    try:
        run(sys.executable, "keys.py", *SITES)
        port, *ports = free_ports(1 + len(SITES))
        config = folder / ".flwr" / "config.toml"
        config.write_text(config.read_text().replace("127.0.0.1:8000", f"127.0.0.1:{port}"))
        tls = ["--ssl-ca-certfile", "keys/ca.pem", "--ssl-certfile", "keys/server.pem"]
        tls += ["--ssl-keyfile", "keys/server.key"]
        link = ("flower-superlink", "--port", str(port), *tls, "--enable-supernode-auth")
        start("link", *link, "--disable-runtime-dependency-installation")
        wait_for(folder / "link.log", "Uvicorn running")
        for i, site in enumerate(SITES):
            run("flwr", "supernode", "register", f"keys/{site}.pub", "trial")
            node_config = f'site="{site}" folder="{folder}/sites"'
            node = ("flower-supernode", "--superlink", f"127.0.0.1:{port}", "--root-certificates", "keys/ca.pem")
            key = ("--auth-supernode-private-key", f"keys/{site}")
            start(site, *node, *key, "--port", str(ports[i]), "--node-config", node_config)
        yield env
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()


def wait_for(log: Path, words: str) -> None:
    deadline = time.monotonic() + 60
    while words not in log.read_text():
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.2)


def test_the_template_gives_what_one_process_gives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "app"
    assert main(["init", "--flower", str(folder)]) == 0
    with deployment(folder) as env:
        command = ["flwr", "run", ".", "trial", "--stream"]
        with (folder / "run.log").open("w") as log:
            stream = subprocess.Popen(command, cwd=folder, env=env, stdout=log, stderr=subprocess.STDOUT)
        deadline, last = time.monotonic() + SECONDS, folder / "runs" / "checkpoints" / "last.ckpt"
        while not (last.is_file() and torch.load(last, weights_only=False)["epoch"] == 2):
            assert time.monotonic() < deadline, (folder / "run.log").read_text()
            time.sleep(1)
        stream.terminate()
        stream.wait(20)
    deployed = torch.load(last, weights_only=False)

    monkeypatch.syspath_prepend(folder)
    from fedapp.federation import make_loop, make_module  # type: ignore[import-not-found]

    loop, module = make_loop(), make_module()
    groups = [i % 3 for i in range(1437)]
    data = FederatedDataModule("digits", GroupPartitioner(), groups=groups, batch_size=16, server_val_fraction=0.0)
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    here = {"max_epochs": 3, "callbacks": [loop], "default_root_dir": tmp_path}
    L.Trainer(logger=False, accelerator="cpu", **here, **quiet).fit(module, data)
    for name, value in module.state_dict().items():
        torch.testing.assert_close(deployed["state_dict"][name], value, rtol=0, atol=1e-6)
    rows = [row.split(",") for row in (folder / "runs" / "contributions.csv").read_text().splitlines()]
    told = {
        (int(client), column): float(value) for r, name, client, column, value in rows if (r, name) == ("2", "cssv")
    }
    cssv = loop.contributions["cssv"]
    for client in range(3):
        for column in range(10):
            assert told[client, str(column)] == pytest.approx(cssv[client, column].item(), abs=1e-6)


def test_secure_aggregation_is_refused() -> None:
    from flwr.client.mod import secaggplus_mod

    with pytest.raises(ConfigurationError, match="secaggplus_mod lets only sums"):
        client_app(L.LightningModule, lambda node: L.LightningDataModule(), FederatedLoop, mods=[secaggplus_mod])


def test_a_node_without_a_name_is_told_what_to_say() -> None:
    with pytest.raises(ConfigurationError, match="names no site, it is {'size': 3}"):
        site_name({"size": 3})
    assert site_name({"site": "Lyon"}) == "Lyon"


def test_packets_survive_the_records() -> None:
    packet = Packet(
        "train", {"a": [1, None, "x"]}, {"v": torch.randn(3), "n": torch.tensor(2), "b": torch.tensor([True])}
    )
    back = from_record(to_record(packet))
    assert (back.kind, back.plain) == (packet.kind, packet.plain)
    for name, tensor in packet.tensors.items():
        torch.testing.assert_close(back.tensors[name], tensor, rtol=0, atol=0)
    with pytest.raises(ValueError, match="this is no packet"):
        from_record(RecordDict())
