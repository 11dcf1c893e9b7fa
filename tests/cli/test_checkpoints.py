"""``--ckpt_path last`` and ``best``, as a user types them."""

from __future__ import annotations

import os
import re
import warnings
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from sifted import slow_except
from toys import Plain, fit, trainer_for

from flsv.cli import main
from flsv.cli.checkpoints import default_checkpoints, find_checkpoint
from flsv.errors import ConfigurationError
from flsv.loop import FederatedLoop

QUICKSTART = str(Path(__file__).parents[2] / "configs" / "digits.yaml")
QUIET = ["--trainer.enable_progress_bar", "false", "--trainer.enable_model_summary", "false"]


def run(command: str, folder: Path, *arguments: str) -> int:
    return main([command, "--config", QUICKSTART, "--trainer.default_root_dir", str(folder), *QUIET, *arguments])


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    assert run("fit", folder, "--trainer.max_epochs", "3") == 0
    return folder


def checkpoint_of(folder: Path, name: str = "last.ckpt") -> Path:
    (path,) = folder.rglob(name)
    return path


@pytest.mark.parametrize(
    ("command", "word"),
    slow_except(
        [("validate", "last"), ("test", "best"), ("predict", "last")],
        product(["validate", "test", "predict"], ["last", "best"]),
    ),
)
def test_what_was_trained_is_evaluated(
    trained: Path, command: str, word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(command, trained, "--ckpt_path", word) == 0
    shown = capsys.readouterr()
    assert f"Weights from {checkpoint_of(trained, f'{word}.ckpt')}" in shown.out
    if command != "predict":
        prefix = {"validate": "val", "test": "test"}[command]
        (accuracy,) = re.findall(rf"{prefix}_accuracy\W+([\d.]+)", shown.out)
        assert float(accuracy) > 0.4  # 0.1 untrained


@pytest.mark.parametrize(
    ("command", "word"),
    slow_except(
        [("fit", "last"), ("validate", "best"), ("test", "last"), ("predict", "best")],
        product(["fit", "validate", "test", "predict"], ["last", "best"]),
    ),
)
def test_without_a_checkpoint_nothing_runs(
    tmp_path: Path, command: str, word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(command, tmp_path, "--ckpt_path", word) == 2
    error = capsys.readouterr().err
    assert f"flsv: error: --ckpt_path {word}: no checkpoint below {tmp_path}" in error
    assert "Traceback" not in error
    assert not list(tmp_path.rglob("*"))


def test_other_runs_below_the_root_folder_are_not_looked_at(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As those of flsv compare, whose folders lie below."""
    mine = tmp_path / "lightning_logs/version_0/checkpoints/last.ckpt"
    other = tmp_path / "compare/shapfed/lightning_logs/version_0/checkpoints/last.ckpt"
    for path in (mine, other):
        path.parent.mkdir(parents=True)
        path.write_bytes(checkpoint_of(trained).read_bytes())
    os.utime(other, (2e9, 2e9))
    assert run("validate", tmp_path, "--ckpt_path", "last") == 0
    assert f"Weights from {mine}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "cannot be read as a checkpoint"),
        (None, "there is no checkpoint"),
        ("half", "cannot be read as a checkpoint"),
    ],
)
@pytest.mark.parametrize("command", slow_except(["fit"], ["fit", "test"]))
def test_a_named_file_that_is_no_checkpoint_is_one_line(
    trained: Path, tmp_path: Path, content: Any, said: str, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "my.ckpt"
    if isinstance(content, dict):
        torch.save(content, path)
    elif content is not None:
        path.write_bytes(checkpoint_of(trained).read_bytes()[:5000] if content == "half" else content)
    assert run(command, tmp_path, "--ckpt_path", str(path)) == 2
    error = [line for line in capsys.readouterr().err.splitlines() if "INFO" not in line and "Restoring" not in line]
    assert [line for line in error if line.startswith("flsv: error:") and said in line and str(path) in line]
    assert not any("Traceback" in line for line in error)


class Rated(Plain):
    """Logs what it is told to, round by round."""

    def __init__(self, name: str | None, values: list[float]) -> None:
        super().__init__()
        self.name, self.values = name, values

    def on_validation_epoch_end(self) -> None:
        if self.name is not None:
            self.log(self.name, self.values[self.current_epoch])


@pytest.mark.parametrize(
    ("name", "values", "best"),
    [
        ("val_accuracy", [0.1, 0.8, 0.5], 1),
        ("val_loss", [0.3, 0.9, 0.5], 0),
        (None, [], None),
    ],
)
def test_best_is_by_accuracy_then_by_loss(
    tmp_path: Path, name: str | None, values: list[float], best: int | None
) -> None:
    saving: dict[str, Any] = {"enable_checkpointing": True, "callbacks": default_checkpoints([])}
    fit(FederatedLoop(seed=0), tmp_path, Rated(name, values), rounds=3, **saving)
    trainer = trainer_for(None, tmp_path)
    assert torch.load(find_checkpoint("last", trainer), weights_only=True)["epoch"] == 2
    if best is None:
        with pytest.raises(ConfigurationError, match="has no best checkpoint, which needs val_accuracy or val_loss"):
            find_checkpoint("best", trainer)
    else:
        assert torch.load(find_checkpoint("best", trainer), weights_only=True)["epoch"] == best


def test_what_was_best_before_a_resume_still_is(tmp_path: Path) -> None:
    values = [0.1, 0.8, 0.5, 0.6]
    for rounds, place in ((3, "first"), (4, "second")):
        folder = tmp_path / place
        saving: dict[str, Any] = {"enable_checkpointing": True, "callbacks": default_checkpoints([])}
        path = None if rounds == 3 else tmp_path / "first/checkpoints/last.ckpt"
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The dirpath has changed")
            fit(FederatedLoop(seed=0), folder, Rated("val_accuracy", values), rounds=rounds, ckpt_path=path, **saving)
    found = find_checkpoint("best", trainer_for(None, tmp_path / "second"))
    assert found == tmp_path / "first/checkpoints/best.ckpt"
