"""A user's project is right under `mypy --strict`, and runs; and what is wrong in it is seen."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils.data import TensorDataset

from flsv.testing import check_part

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


@pytest.mark.slow
def test_typed_user_project_runs_and_values_its_clients(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(PROJECT.parent))
    import user_project as project  # type: ignore[import-not-found]

    x = torch.randn(60, 1, 4, 4)
    y = torch.arange(60) % 3
    values = project.federation(TensorDataset(x, y), tmp_path)

    assert (values > 0).all()
    assert len(values) == 3
    assert project.of_arrays(x, y).partitioner.num_clients == 2

    net = torch.nn.Linear(2, 2, bias=False)
    moved = [{"weight": net.weight.detach() + step} for step in (0.1, -0.1)]

    batch = (torch.ones(4, 2), torch.tensor([0, 1, 0, 1]))
    values_of_round = project.cosine_values_of_round(net, moved, batch)
    assert len(values_of_round) == 2

    check_part(project.UpdateSize())
    check_part(project.ShortestFirst("norm"))
