"""A SuperLink and three SuperNodes with TLS and authentication, as the guide starts them."""

import csv
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from flsv.data import Splits

pytest.importorskip("flwr", reason="needs flwr: make flower")

from flwr.app import RecordDict

from flsv import FederatedDataModule
from flsv.data import GroupPartitioner
from flsv.engines.flower import from_record, to_record
from flsv.engines.remote import Packet
from helpers.fits import trainer_for
from helpers.ports import free_ports
from helpers.sites import BIN, SECONDS

pytestmark = pytest.mark.flower


PAGE = Path(__file__).parents[3] / "docs" / "deployment.md"


def run_commands_of_page(folder: Path) -> subprocess.CompletedProcess[str]:
    """Run the first commands of the guide, but for those that install what is installed here."""
    (block,) = re.findall(
        r"## Try it on one machine\n.*?```bash\n(.*?)```", PAGE.read_text(), flags=re.DOTALL
    )
    installation, commands = block.split("flsv init", 1)
    assert len(installation.splitlines()) == 2  # and nothing else is left out

    # Others on this machine may run the commands of the page, too.
    first_port = f"port={free_ports(1)[0]}"
    commands = commands.replace("port=9101", first_port)
    assert first_port in commands

    stop_at_the_end = "trap 'kill $(jobs -p) 2> /dev/null' EXIT"
    script = f"set -e; {stop_at_the_end}\nflsv init{commands}"
    env = {**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    env["SUPERLINK"] = f"127.0.0.1:{free_ports(1)[0]}"
    return subprocess.run(
        ["bash", "-c", script], cwd=folder, env=env, capture_output=True, text=True, timeout=SECONDS
    )


def assert_as_one_process(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The template's run of three rounds."""
    deployed = torch.load(folder / "runs" / "checkpoints" / "last.ckpt", weights_only=False)
    monkeypatch.syspath_prepend(folder)
    earlier_imports = [name for name in sys.modules if name.startswith("fedapp")]

    for name in earlier_imports:
        monkeypatch.delitem(sys.modules, name)

    from fedapp.federation import make_loop, make_module  # type: ignore[import-not-found]

    loop = make_loop()
    module = make_module()
    groups = [i % 3 for i in range(1437)]
    data = FederatedDataModule(
        "digits", GroupPartitioner(), groups=groups, batch_size=16, splits=Splits(server_val=0.0)
    )
    trainer_for(loop, tmp_path, 3).fit(module, data)

    for name, value in module.state_dict().items():
        torch.testing.assert_close(deployed["state_dict"][name], value, rtol=0, atol=1e-6)

    with (folder / "runs" / "contributions.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))

    values = {}
    for row in rows:
        if row["round"] == "2" and row["metric"] == "cssv":
            values[int(row["client"]), row["class"]] = float(row["value"])

    cssv = loop.contributions["cssv"].by_class
    for client in range(3):
        for column in range(10):
            expected = cssv[client, column].item()
            assert values[client, str(column)] == pytest.approx(expected, abs=1e-6)


def test_deployment_by_the_guides_commands_equals_one_process(tmp_path, monkeypatch):
    folder = tmp_path / "federation"
    done = run_commands_of_page(tmp_path)

    assert done.returncode == 0, done.stdout + done.stderr
    assert "the run has finished" in done.stdout

    log = (folder / "Boston.log").read_text()  # a line a message: what it has, and three rounds
    assert (
        len(re.findall(r"flsv: Flower run \d+ asks '(?:hello|train)' .*sha256 [0-9a-f]{64}", log))
        == 4
    )
    assert (folder / "runs" / "report.html").is_file()
    assert_as_one_process(folder, tmp_path, monkeypatch)


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
    read = from_record(to_record(packet))

    assert read.kind == packet.kind
    assert read.plain == packet.plain
    for name, tensor in packet.tensors.items():
        torch.testing.assert_close(read.tensors[name], tensor, rtol=0, atol=0)

    with pytest.raises(ValueError, match="this is no packet"):
        from_record(RecordDict())
