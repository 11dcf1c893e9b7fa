"""The scripts of examples/, whole, with one round and little data."""

import csv
import runpy
import sys
from pathlib import Path

import pytest

from helpers.runs import read_rows

EXAMPLES = Path(__file__).parents[2] / "examples"
ONE_ROUND = {
    "hospitals.py": ["--rounds", "1"],
    "adapters.py": [
        "--root",
        "data",
        "--rounds",
        "1",
        "--layers",
        "1",
        "--width",
        "8",
        "--vocabulary",
        "300",
    ],
    "language_model.py": ["--root", "data", "--rounds", "1", "--steps", "3", "--width", "8"],
    "lightning_project.py": ["--epochs", "1", "--clients", "3"],
    "text.py": ["--rounds", "1", "--characters", "1500"],
    "vision_timm.py": ["--rounds", "1", "--network", "test_resnet"],
}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write_texts(folder):
    """News and tales, a few lines each."""
    folder.mkdir(parents=True)
    tales = [["group", "text"]]
    for group in ("king", "wolf"):
        sentence = f"once upon a time there was a {group} who went into the wood. "
        tales.append([group, sentence * 30])
    news = [["label", "text"]]
    for label in ("earn", "acq", "earn"):
        news.append([label, "profits rose by a dollar a share " * 8])

    files = {"grimm_tales.csv": tales, "reuters_r8_train.csv": news, "reuters_r8_test.csv": news}
    for name, rows in files.items():
        with (folder / name).open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows(rows)


def test_every_example_script_is_run_by_a_test():
    assert sorted(ONE_ROUND) == sorted(path.name for path in EXAMPLES.glob("*.py"))


@pytest.mark.by_turn
@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(ONE_ROUND))
def test_example_runs_and_measures_contributions(name, folder, monkeypatch):
    monkeypatch.setattr(sys, "argv", [name, *ONE_ROUND[name]])
    if name in ("adapters.py", "language_model.py"):
        pytest.importorskip(
            "transformers", reason="transformers is not installed: pip install peft"
        )
        pytest.importorskip("peft", reason="peft is not installed: pip install peft")
        write_texts(folder / "data" / "text")

    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    (written,) = folder.glob("runs/**/contributions.csv")
    rows = read_rows(written)

    assert {row["metric"] for row in rows} & {"value", "cssv"}
