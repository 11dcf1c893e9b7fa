"""NVFlare's server and three sites with their certificates, as the guide starts them."""

import csv
import os
import re
import subprocess
import sys
from pathlib import Path
from runpy import run_path

import pytest
import torch

pytest.importorskip("nvflare", reason="needs nvflare: make nvflare")

from flsv import FederatedDataModule
from flsv.data import GroupPartitioner, Splits
from helpers.fits import trainer_for
from helpers.sites import BIN, SECONDS

pytestmark = [pytest.mark.nvflare, pytest.mark.long]

PAGE = Path(__file__).parents[3] / "docs" / "nvflare.md"


def run_commands_of_page(folder: Path) -> subprocess.CompletedProcess[str]:
    """Run the first commands of the guide, but for those that install what is installed here."""
    pattern = r"## Try it on one machine\n.*?```bash\n(.*?)```"
    (block,) = re.findall(pattern, PAGE.read_text(), flags=re.DOTALL)
    installation, commands = block.split("flsv init", 1)
    assert len(installation.splitlines()) == 2  # and nothing else is left out

    stop_at_the_end = "trap 'nvflare poc stop' EXIT"
    script = f"set -e; {stop_at_the_end}\nflsv init{commands}"
    env = {
        **os.environ,
        "HOME": str(folder),  # NVFlare writes its settings there
        "PATH": f"{BIN}:{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "OMP_NUM_THREADS": "1",
    }

    return subprocess.run(
        ["bash", "-c", script],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )


def test_deployment_by_the_guides_commands_equals_one_process(tmp_path):
    process = run_commands_of_page(tmp_path)
    assert process.returncode == 0, process.stdout + process.stderr
    assert "FINISHED:COMPLETED" in process.stderr

    project = tmp_path / "federation"
    workspaces = project / "poc" / "example_project" / "prod_00"

    run_folder = workspaces / "server" / "runs"
    assert (run_folder / "report.html").is_file()

    deployed = torch.load(run_folder / "checkpoints" / "last.ckpt", weights_only=False)
    code = run_path(str(project / "job" / "app" / "custom" / "federation.py"))
    module = code["make_module"]()
    loop = code["make_loop"]()
    data = FederatedDataModule(
        "digits",
        GroupPartitioner(),
        groups=[sample % 3 for sample in range(1437)],
        batch_size=16,
        splits=Splits(server_val=0.0),
    )
    trainer_for(loop, tmp_path / "one_process", 3).fit(module, data)

    for name, value in module.state_dict().items():
        torch.testing.assert_close(deployed["state_dict"][name], value, rtol=0, atol=1e-6)

    values = {}
    with (run_folder / "contributions.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            is_of_class = row["metric"] == "cssv" and row["class"] != ""
            if row["round"] == "2" and is_of_class:
                cell = int(row["client"]), int(row["class"])
                values[cell] = float(row["value"])

    cssv = loop.contributions["cssv"].by_class
    assert len(values) == cssv.numel()
    for cell, value in values.items():
        assert value == pytest.approx(cssv[cell].item(), abs=1e-6)
