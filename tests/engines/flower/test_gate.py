"""nginx before the SuperLink, by the template's file: what sites reach through it, and what nobody does."""

from __future__ import annotations

import shutil
import ssl
import urllib.error
import urllib.request
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="needs pip install 'flsv[flower]'")

from flower_deployment import ACCEPTED, SITES, deployment

from flsv.cli import main

pytestmark = [
    pytest.mark.flower,
    pytest.mark.skipif(shutil.which("nginx") is None, reason="needs nginx"),
]


def test_sites_run_through_the_gate_and_nobody_controls_through_it(tmp_path: Path) -> None:
    folder = tmp_path / "app"
    assert main(["init", "--flower", str(folder), "--quiet"]) == 0
    with deployment(folder, gate=True) as processes:
        for site in SITES:
            processes.wait_for(site, lambda log: ACCEPTED in log)
        trusted = ssl.create_default_context(cafile=folder / "keys" / "ca.pem")

        def answer(address: str, path: str) -> int:
            asked = urllib.request.Request(f"https://{address}{path}", data=b"", method="POST")
            try:
                with urllib.request.urlopen(asked, context=trusted, timeout=20) as reply:
                    return int(reply.status)
            except urllib.error.HTTPError as error:
                return error.code

        link = processes.env["SUPERLINK"]
        for path in ("/v1/control/start-run", "/v1/control/register-node", "/v1/runtime/acquire-task"):
            assert answer(link, path) != 404, path
            assert answer(processes.gate, path) == 404, path
        assert answer(processes.gate, "/v1/fleet/../control/start-run") == 404
        processes.supervise("rounds", folder, folder / "runs" / "status.json")
        processes.wait_for("rounds", lambda log: "the run has finished" in log, 300)
