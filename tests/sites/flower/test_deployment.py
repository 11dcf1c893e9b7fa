"""A SuperLink and three SuperNodes with TLS and authentication, as the guide starts them."""

import re

import pytest
import torch

pytest.importorskip("flwr", reason="needs flwr: make flower")

from flwr.app import RecordDict

from flsv.sites import Packet
from flsv.sites.flower import from_record, to_record
from helpers.ports import free_ports
from helpers.sites import assert_template_equals_one_process, first_commands, run_script

pytestmark = pytest.mark.flower


def test_deployment_by_the_guides_commands_equals_one_process(tmp_path):
    folder = tmp_path / "federation"
    # Others on this machine may run the commands of the page, too.
    first_port, port_of_link = free_ports(2)
    commands = first_commands("deployment.md").replace("port=9101", f"port={first_port}")
    assert f"port={first_port}" in commands

    printed, _ = run_script(
        tmp_path,
        commands,
        at_end="kill $(jobs -p) 2> /dev/null",
        SUPERLINK=f"127.0.0.1:{port_of_link}",
    )

    assert "the run has finished" in printed

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
