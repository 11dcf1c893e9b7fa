"""A metric's package is written, installed, tested by its own test, and trained with by name."""

import importlib
import subprocess
import sys

import pytest

from flsv.cli import main
from flsv.cli.new import new
from helpers.forked import Forked

MODULE = "update_length"


@pytest.mark.slow
def test_new_metric_package_can_be_installed_and_trained_with(tmp_path):
    package = new("UpdateLength", tmp_path)
    installed = tmp_path / "installed"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index"]
    offline = ["--no-deps", "--no-build-isolation", "--target", str(installed)]
    subprocess.run([*pip, *offline, str(package)], check=True)

    def fit() -> int:
        sys.path.append(str(installed))
        return main(
            [
                "fit",
                "--config",
                "digits",
                "--config",
                f"../{MODULE}/{MODULE}.yaml",
                "--trainer.max_epochs=1",
            ]
        )

    status, printed = Forked(tmp_path / "run", fit).wait()
    assert status == 0, printed

    (table,) = tmp_path.rglob("contributions.csv")
    lines = table.read_text().splitlines()[1:]

    assert MODULE in {line.split(",")[1] for line in lines}


def test_test_of_the_new_metric_package_passes(tmp_path, monkeypatch):
    package = new("UpdateLength", tmp_path)
    monkeypatch.syspath_prepend(str(package))
    test_module = importlib.import_module(f"test_{MODULE}")

    test_of_checks = test_module.test_it_does_what_every_metric_does
    (parametrize_mark,) = test_of_checks.pytestmark
    _argument_name, checks = parametrize_mark.args
    for check in checks:
        test_of_checks(check=check)

    test_module.test_by_hand()
    for module in (MODULE, f"test_{MODULE}"):
        del sys.modules[module]


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("Torch", "there is a module torch already"),
        ("../there", "no name of a class"),
        (
            "HeldPlace",
            "held_place is there already: choose another name, or another place by --out",
        ),
    ],
)
def test_new_metric_with_a_name_that_is_invalid_or_taken_is_refused(name, why, tmp_path, capsys):
    (tmp_path / "held_place").mkdir()
    assert main(["new", "metric", name, "--out", str(tmp_path)]) == 2
    assert why in capsys.readouterr().err
    assert list(tmp_path.rglob("*")) == [tmp_path / "held_place"]


def test_new_metric_does_not_overwrite_an_existing_folder(tmp_path, capsys):
    (tmp_path / "held_place").mkdir()
    assert main(["new", "metric", "HeldPlace", "--out", str(tmp_path)]) == 2
    assert (
        "held_place is there already: choose another name, or another place by --out"
        in capsys.readouterr().err
    )
    assert list((tmp_path / "held_place").iterdir()) == []
