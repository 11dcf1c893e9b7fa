"""Mutants of a small module, of which a test catches some."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "tools/mutants.py"
MODULE = """
def clip(value, limit=1):
    if value > limit:
        print("clipped")
        return limit
    return value * 2
"""
TEST = """
from clipping import clip

def test_clip():
    assert clip(3) == 1
    assert clip(-1) == -2
"""


@pytest.mark.slow
def test_each_mutant_is_printed_with_the_test_that_catches_it(tmp_path):
    (tmp_path / "clipping.py").write_text(MODULE)
    (tmp_path / "test_clipping.py").write_text(TEST)
    command = [sys.executable, str(SCRIPT), "clipping", "test_clipping.py"]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    process = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    )

    lines = [line for line in process.stdout.splitlines() if line.startswith("clipping.py")]
    caught = "test_clipping.py::test_clip"
    assert sorted(lines) == [
        "clipping.py:3 value > limit -> value >= limit: -",
        "clipping.py:4 print('clipped') -> None: -",
        f"clipping.py:6 2 -> 3: {caught}",
        f"clipping.py:6 value * 2 -> value + 2: {caught}",
    ]
