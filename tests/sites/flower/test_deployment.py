"""A SuperLink and three SuperNodes with TLS and authentication, as the guide starts them."""

import os
import re
import subprocess

import pytest
import torch

pytest.importorskip("flwr", reason="needs flwr: make flower")

from flwr.app import RecordDict

from flsv.sites import Packet
from flsv.sites.flower import from_record, to_record
from helpers.ports import free_ports
from helpers.sites import BIN, SECONDS, assert_template_equals_one_process, first_commands

pytestmark = pytest.mark.flower


def run_commands_of_page(folder):
    # Others on this machine may run the commands of the page, too.
    first_port = f"port={free_ports(1)[0]}"
    commands = first_commands("deployment.md").replace("port=9101", first_port)
    assert first_port in commands

    stop_at_the_end = "trap 'kill $(jobs -p) 2> /dev/null' EXIT"
    script = f"set -e; {stop_at_the_end}\n{commands}"
    env = {**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    env["SUPERLINK"] = f"127.0.0.1:{free_ports(1)[0]}"
    return subprocess.run(
        ["bash", "-c", script], cwd=folder, env=env, capture_output=True, text=True, timeout=SECONDS
    )


def test_deployment_by_the_guides_commands_equals_one_process(tmp_path):
    folder = tmp_path / "federation"
    process = run_commands_of_page(tmp_path)

    assert process.returncode == 0, process.stdout + process.stderr
    assert "the run has finished" in process.stdout

    log = (folder / "Boston.log").read_text()
    request = r"flsv: Flower run \d+ requests '(?:handshake|train)' .*sha256 [0-9a-f]{64}"
    num_handshakes = 1
    num_rounds = 3
    assert len(re.findall(request, log)) == num_handshakes + num_rounds
    assert (folder / "runs" / "report.html").is_file()
    federation = folder / "fedapp" / "federation.py"
    assert_template_equals_one_process(federation, folder / "runs", tmp_path)


def test_packet_converted_to_a_flower_record_and_back_is_equal():
    packet = Packet(
        "train",
        {"a": [1, None, "x"]},
        {
            "v": torch.randn(3),
            "n": torch.tensor(2),
            "b": torch.tensor([True]),
        },
    )
    packet_read = from_record(to_record(packet))

    assert packet_read.kind == packet.kind
    assert packet_read.plain == packet.plain
    for name, tensor in packet.tensors.items():
        torch.testing.assert_close(packet_read.tensors[name], tensor, rtol=0, atol=0)


def test_record_of_something_else_is_no_packet():
    with pytest.raises(ValueError, match="not a packet of flsv"):
        from_record(RecordDict())
