"""The scripts of examples/, whole, with one round and little data."""

from __future__ import annotations

import csv
import runpy
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
ONE_ROUND = {
    "hospitals.py": ["--rounds", "1"],
    "lightning_project.py": ["--epochs", "1", "--clients", "3"],
    "text.py": ["--rounds", "1", "--characters", "1500"],
    "vision_timm.py": ["--rounds", "1", "--network", "test_resnet"],
}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")  # to be restored: seed_everything sets it
    return tmp_path


def test_all_are_run_here() -> None:
    assert sorted(ONE_ROUND) == sorted(path.name for path in EXAMPLES.glob("*.py"))


@pytest.mark.parametrize("name", sorted(ONE_ROUND))
def test_a_script_runs_and_measures(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [name, *ONE_ROUND[name]])
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    (written,) = folder.glob("runs/**/contributions.csv")
    rows = list(csv.DictReader(written.open()))
    assert {row["metric"] for row in rows} & {"value", "cssv"}


def test_the_project_runs_as_it_was(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["lightning_project.py", "--epochs", "1"])
    runpy.run_path(str(EXAMPLES / "lightning_project.py"), run_name="__main__")
    assert not list(folder.glob("runs/**/contributions.csv"))
