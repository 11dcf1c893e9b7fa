"""Configurations by name, copies of them to edit, and the wheel that holds them."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from flsv import ConfigurationError
from flsv.cli import main
from flsv.cli.configs import find_config, packaged_names

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "configs"


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_every_packaged_configuration_is_found_by_its_name() -> None:
    files = {path.resolve() for path in CONFIGS.rglob("*.yaml")}
    assert len(files) > 60
    assert {find_config(name).resolve() for name in packaged_names()} == files
    assert len(packaged_names()) == len(files)


def test_local_file_takes_precedence_over_a_packaged_configuration() -> None:
    Path("fedavg.yaml").write_text("federation: {}")
    assert find_config("fedavg") == Path("fedavg.yaml")


def test_unknown_configuration_names_the_packaged_ones() -> None:
    with pytest.raises(ConfigurationError, match="there is no configuration file quickstrat.* come .* quickstart, "):
        find_config("quickstrat")


def test_init_copies_configurations_and_overwrites_no_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init"]) == 0
    assert Path("quickstart.yaml").read_text() == (CONFIGS / "quickstart.yaml").read_text()
    assert find_config("quickstart") == Path("quickstart.yaml")
    assert main(["init", "mine", "--config", "fedsv", "--config", "scenarios/guo_noisy"]) == 0
    assert sorted(path.name for path in Path("mine").iterdir()) == ["fedsv.yaml", "guo_noisy.yaml"]
    assert "flsv fit --config mine/fedsv.yaml --config mine/guo_noisy.yaml" in capsys.readouterr().out
    Path("quickstart.yaml").write_text("mine")
    assert main(["init"]) == 2
    assert "is there already" in capsys.readouterr().err
    assert Path("quickstart.yaml").read_text() == "mine"
    for options in (["quickstart.yaml"], ["--flower", "quickstart.yaml"], ["quickstart.yaml/mine"]):
        assert main(["init", *options]) == 2
        assert "nothing can be written into quickstart.yaml" in capsys.readouterr().err


@pytest.mark.slow
def test_a_wheel_runs_without_a_checkout(tmp_path: Path) -> None:
    pytest.importorskip("hatchling", reason="hatchling is not installed: no wheel")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "installed")  # which is all that pip does with a wheel of plain Python
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "installed")}
    quick = "--trainer.max_epochs 1 --trainer.limit_train_batches 1 --trainer.enable_progress_bar false"
    code = (
        "import pathlib, sys, flsv; from flsv.cli import main; from flsv.cli.configs import FOLDER, packaged_names\n"
        f"assert {str(tmp_path / 'installed')!r} in flsv.__file__ and FOLDER.parent.name == 'flsv', FOLDER\n"
        f"assert len(packaged_names()) == {len(packaged_names())}\n"
        f"failed = main('fit --config quickstart {quick}'.split())\n"
        "(run,) = pathlib.Path().glob('**/contributions.csv')\n"
        "sys.exit(failed or main(['report', str(run.parent)]))"
    )
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "Contributions" in done.stdout
    (report,) = (tmp_path / "lightning_logs").glob("**/report.html")
    assert "<svg" in report.read_text()
