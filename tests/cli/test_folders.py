"""Folders that cannot be written end in one line, and so does a second command in a folder that is being written."""

from __future__ import annotations

from pathlib import Path

import pytest

from flsv.cli import main
from flsv.report.folder import FolderLock

COMMANDS = {
    "fit": ["fit", "--config", "digits", "--trainer.default_root_dir={}"],
    "repeat": ["repeat", "2", "--config", "digits", "--out", "{}"],
    "compare": ["compare", "--config", "digits", "--out", "{}"],
    "bench": ["bench", "--metric", "size", "--federations", "digits_sizes", "--out", "{}"],
    "value": ["value", "--config", "digits", "--out", "{}"],
    "retrain": ["retrain", "{}"],
    "report": ["report", "{}"],
}


def run(name: str, folder: Path) -> int:
    return main([word.format(folder) for word in COMMANDS[name]])


@pytest.mark.parametrize("name", [name for name in COMMANDS if name not in ("retrain", "report")])
def test_a_folder_below_a_file(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    assert run(name, tmp_path / "file" / "out") == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("flsv: error")]
    assert f"nothing can be written into {tmp_path}/file/out" in line
    assert "Not a directory. Name another folder" in line


@pytest.mark.parametrize("name", [name for name in COMMANDS if name not in ("fit", "report", "value")])
def test_one_command_at_a_time_in_a_folder(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with FolderLock(tmp_path):
        assert run(name, tmp_path) == 2
    assert f"another run is writing into {tmp_path}: wait for its end" in capsys.readouterr().err
    FolderLock(tmp_path).release()


def test_a_second_run_of_one_name_has_its_own_configuration(tmp_path: Path) -> None:
    """Lightning refuses to write the configuration a second time unless it is told that it may."""
    logger = [
        "--trainer.logger=TensorBoardLogger",
        f"--trainer.logger.save_dir={tmp_path}",
        "--trainer.logger.version=mine",
    ]
    for seed in (1, 2):
        short = ["--trainer.max_epochs=1", f"--federation.seed={seed}", f"--trainer.default_root_dir={tmp_path}"]
        assert main(["fit", "--config", "digits", *short, *logger]) == 0
    (config,) = tmp_path.rglob("config.yaml")
    assert "seed: 2" in config.read_text()
