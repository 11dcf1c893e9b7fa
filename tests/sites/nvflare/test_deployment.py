"""NVFlare's server and three sites with their certificates, as the guide starts them."""

import os
import sys

import pytest

pytest.importorskip("nvflare", reason="needs nvflare: make nvflare")

from helpers.sites import assert_template_equals_one_process, first_commands, run_script

pytestmark = [pytest.mark.nvflare, pytest.mark.long]


def test_deployment_by_the_guides_commands_equals_one_process(tmp_path):
    _, messages = run_script(
        tmp_path,
        first_commands("nvflare.md"),
        at_end="nvflare poc stop",
        HOME=str(tmp_path),  # NVFlare writes its settings there
        PYTHONPATH=os.pathsep.join(filter(None, sys.path)),
    )
    assert "FINISHED:COMPLETED" in messages

    project = tmp_path / "federation"
    workspaces = project / "poc" / "example_project" / "prod_00"

    run_folder = workspaces / "server" / "runs"
    assert (run_folder / "report.html").is_file()

    federation = project / "job" / "app" / "custom" / "federation.py"
    assert_template_equals_one_process(federation, run_folder, tmp_path / "one_process")
