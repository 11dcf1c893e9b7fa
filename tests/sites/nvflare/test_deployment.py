"""NVFlare's server and three sites with their certificates, as the guide starts them."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("nvflare", reason="needs nvflare: make nvflare")

from helpers.sites import BIN, SECONDS, assert_template_equals_one_process, first_commands

pytestmark = [pytest.mark.nvflare, pytest.mark.long]


def run_commands_of_page(folder):
    stop_at_the_end = "trap 'nvflare poc stop' EXIT"
    script = f"set -e; {stop_at_the_end}\n{first_commands('nvflare.md')}"
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

    federation = project / "job" / "app" / "custom" / "federation.py"
    assert_template_equals_one_process(federation, run_folder, tmp_path / "one_process")
