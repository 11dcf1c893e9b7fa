"""A user's project is right under `mypy --strict`, and what is wrong in it is seen."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROJECT = Path(__file__).parent / "user_project.py"
ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.long
def test_mypy_accepts_a_users_project_and_finds_its_type_errors(tmp_path):
    """One run of mypy for what is right and what is wrong: it reads torch and Lightning once."""
    pytest.importorskip("mypy", reason="flsv[dev] is not installed")
    # Types are there to say no: were flsv untyped to them, this would pass as well.
    text = PROJECT.read_text()
    wrong = {
        'FederatedDataModule(data, partitioner=IIDPartitioner(num_clients=3, seed=1))':
        'FederatedDataModule(data, partitioner=IIDPartitioner(num_clients="three"))',
        'metrics={"norm": UpdateSize()}': 'metrics={"norm": 3}',
        'Reporting(table=False)': 'Reporting(tables=False)',
        "round.client_ids": "round.client_numbers",
        "metrics=flsv.metrics.CosineGradientShapley()": "metrics=[1]",
    }  # fmt: skip
    for old, new in wrong.items():
        assert old in text
        text = text.replace(old, new)

    (tmp_path / "wrong_project.py").write_text(text)
    options = [
        "--strict",
        "--config-file",
        os.devnull,
        "--follow-imports",
        "silent",
        "--cache-dir",
        os.devnull,
    ]
    checked = subprocess.run(
        [sys.executable, "-m", "mypy", *options, PROJECT, tmp_path / "wrong_project.py"],
        env=os.environ | {"MYPYPATH": str(ROOT)}, cwd=tmp_path, capture_output=True, text=True,
    )  # fmt: skip
    errors = [line for line in checked.stdout.splitlines() if ": error: " in line]

    assert [line for line in errors if not line.startswith("wrong_project.py:")] == [], (
        checked.stdout
    )
    for kind in ("arg-type", "dict-item", "call-arg", "attr-defined", "list-item"):
        assert f"[{kind}]" in checked.stdout, checked.stdout
