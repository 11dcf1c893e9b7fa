"""A package of each kind is written, installed, tested by its own test, and trained with by name."""

from __future__ import annotations

import importlib
import inspect
import os
import subprocess
import sys
from pathlib import Path

import pytest

from flsv.cli import main
from flsv.cli.new import KINDS, new

REPOSITORY = Path(__file__).parents[2]
NAMES = {"metric": "UpdateLength", "aggregator": "loss_leaning", "algorithm": "Tether", "source": "JsonLines"}
MODULES = {"metric": "update_length", "aggregator": "loss_leaning", "algorithm": "tether", "source": "json_lines"}


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one of each kind, and ``installed``, what pip has made of them."""
    folder = tmp_path_factory.mktemp("packages")
    assert NAMES.keys() == KINDS.keys()
    made = [new(kind, name, folder) for kind, name in NAMES.items()]
    offline = ["--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--target", str(folder / "installed")]
    subprocess.run([sys.executable, "-m", "pip", "install", *offline, *map(str, made)], check=True)
    return folder


def run(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """Run Python in a folder, with flsv and with what is installed there or beside it."""
    installed = next(place / "installed" for place in (folder, folder.parent) if (place / "installed").is_dir())
    path = os.pathsep.join([str(REPOSITORY), str(installed)])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, *command], cwd=folder, env=environment, capture_output=True, text=True)


@pytest.mark.slow
def test_their_tests_pass_as_they_are_written(packages: Path) -> None:
    done = run(packages, "-m", "pytest", "-p", "no:cacheprovider", *MODULES.values())
    assert done.returncode == 0, done.stdout[-3000:]
    assert {name for name in MODULES.values() if f"test_{name}.py ." in done.stdout} == {*MODULES.values()}


@pytest.mark.parametrize(("kind", "name"), NAMES.items())
def test_its_test_passes_in_this_process(kind: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(new(kind, name, tmp_path)))
    written = importlib.import_module(f"test_{MODULES[kind]}")
    tests = [test for name, test in vars(written).items() if name.startswith("test_")]
    assert len(tests) == (1 if kind == "source" else 2)
    for test in tests:
        marks = getattr(test, "pytestmark", [])
        for check in marks[0].args[1] if marks else [None]:
            given = {"check": check, "tmp_path": tmp_path}
            test(**{name: given[name] for name in inspect.signature(test).parameters})
    for module in (MODULES[kind], f"test_{MODULES[kind]}"):
        del sys.modules[module]


@pytest.mark.slow
def test_all_of_them_in_one_run(packages: Path) -> None:
    """From the folder of the source, whose example it reads; what the others are called is installed."""
    files = [str(packages / module / f"{module}.yaml") for module in MODULES.values()]
    configs = [part for file in ["quickstart", *files] for part in ("--config", file)]
    options = ["--trainer.max_epochs=1", "--trainer.limit_train_batches=1"]
    done = run(packages / "json_lines", "-m", "flsv", "fit", *configs, *options, "--quiet")
    assert done.returncode == 0, done.stderr[-3000:]
    (table,) = (packages / "json_lines" / "runs").rglob("contributions.csv")
    assert {line.split(",")[1] for line in table.read_text().splitlines()[1:]} >= {"update_length", "weight"}


@pytest.mark.parametrize(
    ("kind", "name", "why"),
    [
        ("metric", "CosineGradientShapley", "flsv.metrics.CosineGradientShapley is flsv's own"),
        ("algorithm", "fed_prox", "there is a module|FedProx is flsv's own"),
        ("aggregator", "Torch", "there is a module torch already"),
        ("metric", "class", "no name of a class"),
        ("metric", "a-b", "no name of a class"),
        ("source", "../there", "no name of a class"),
        ("source", "_Hidden", "no name of a class"),
        ("source", "", "no name of a class"),
    ],
)
def test_a_name_that_cannot_be(
    kind: str, name: str, why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["new", kind, name, "--out", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert any(each in said for each in why.split("|")), said
    assert list(tmp_path.iterdir()) == []


def test_nothing_that_is_there_is_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "held_place").mkdir()
    assert main(["new", "metric", "HeldPlace", "--out", str(tmp_path)]) == 2
    assert "held_place is there already: choose another name, or another place by --out" in capsys.readouterr().err
    assert list((tmp_path / "held_place").iterdir()) == []
    assert main(["new", "metric", "NothingLikeIt", "--out", str(tmp_path), "--quiet"]) == 0
    assert capsys.readouterr().out == ""


def test_init_writes_a_flower_project(tmp_path: Path) -> None:
    main(["init", "--flower", str(tmp_path / "project")])
    assert {"README.md", "pyproject.toml", "keys.py", "fedapp"} <= {
        path.name for path in (tmp_path / "project").iterdir()
    }
    assert "server_app" in (tmp_path / "project/fedapp/federation.py").read_text()
