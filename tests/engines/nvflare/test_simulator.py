"""Federations in NVFlare's simulator, whose server and sites are processes, equal those in one process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("nvflare", reason="needs nvflare: make nvflare")

from helpers.nvflare_federations import FEDERATIONS
from helpers.sites import NAMES, fit_in_one_process

pytestmark = pytest.mark.nvflare

SECONDS = 600  # a busy machine takes ten times as long as an idle one
JOB = """
import sys
from nvflare.job_config.api import FedJob
from flsv.engines.nvflare import FlsvController, FlsvExecutor

job = FedJob("flsv")
for name in sys.argv[1].split():
    job.to_server(FlsvController(f"federations:{name}_server"))
job.to_server("federations.py")
for site in sys.argv[2:]:
    job.to(FlsvExecutor("federations:client"), site)
    job.to("federations.py", site)
job.simulator_run("workspace", threads=len(sys.argv[2:]))
"""


@pytest.fixture(scope="module")
def server_folder(tmp_path_factory):
    """The server's folder after a job that runs all federations."""
    folder = tmp_path_factory.mktemp("simulator")
    (folder / "federations.py").write_text("from helpers.nvflare_federations import *\n")
    tests_folder = str(Path(__file__).parents[2])
    other_folders = [path for path in sys.path if path]
    python_path = os.pathsep.join([tests_folder, *other_folders])
    process = subprocess.run(
        [sys.executable, "-c", JOB, " ".join(FEDERATIONS), *NAMES],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": python_path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )

    assert process.returncode == 0, process.stdout + process.stderr

    return folder / "workspace" / "server"


@pytest.mark.parametrize("name", FEDERATIONS)
def test_simulated_federation_equals_one_process(server_folder, tmp_path, name):
    make_loop, data = FEDERATIONS[name]
    loop = fit_in_one_process(tmp_path, make_loop, **data)
    results = torch.load(server_folder / name / "checkpoints" / "results.pt", weights_only=True)

    assert torch.equal(results["model"], loop.state.model())
    for metric, values in loop.contribution_metrics.contributions.items():
        # What a site thinks of one that it was never sent is NaN.
        torch.testing.assert_close(
            results["values"][metric],
            values.as_subclass(torch.Tensor),
            rtol=0,
            atol=0,
            equal_nan=True,
        )
