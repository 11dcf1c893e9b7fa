"""The core works without its leaves: all of them can be taken away."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import flsv

SCRIPT = Path(__file__).with_name("leaves.py")


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="os.fork is not here")
def test_federations_train_without_any_leaf(tmp_path):
    root = Path(flsv.__file__).parents[1]
    tests = SCRIPT.parents[1]
    paths = os.pathsep.join([str(root), str(tests)])
    command = [sys.executable, str(SCRIPT), str(tmp_path)]

    finished = subprocess.run(
        command,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
    )

    printed = finished.stdout.splitlines()
    endings = [line for line in printed if line.startswith("RUN ")]
    assert endings == ["RUN command 0", "RUN python 0", "RUN unscored 0"], finished.stderr[-3000:]
