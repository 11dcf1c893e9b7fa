"""Checkpoints are whole or not there: after a kill, on a full disk, wherever the temporary folder is."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.plugins import TorchCheckpointIO
from toys import Plain, fit, toy_data, trainer_for

from flsv._lightning.durable import append, replacing
from flsv._lightning.round_boundary import DurableCheckpointIO
from flsv.cli import main
from flsv.errors import ConfigurationError
from flsv.loop import FederatedLoop

QUICKSTART = str(Path(__file__).parents[2] / "configs" / "digits.yaml")
QUIET = ["--trainer.enable_progress_bar", "false", "--trainer.enable_model_summary", "false"]


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_checkpoint_is_written_beside_its_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not in the system's temporary folder, from which a move may be a copy."""
    moves = []
    monkeypatch.setattr(os, "replace", lambda a, b, move=os.replace: (moves.append((Path(a), Path(b))), move(a, b)))
    trainer = trainer_for(FederatedLoop(), tmp_path / "run", rounds=1)
    trainer.fit(Plain(), toy_data())
    moves.clear()
    trainer.save_checkpoint(tmp_path / "model.ckpt")
    assert [(a.parent, b) for a, b in moves] == [(tmp_path, tmp_path / "model.ckpt")]
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["model.ckpt"]


def test_a_plugin_of_the_users_own_stays(tmp_path: Path) -> None:
    class Own(TorchCheckpointIO):
        pass

    trainer = trainer_for(FederatedLoop(), tmp_path, rounds=1, plugins=[own := Own()])
    trainer.fit(Plain(), toy_data())
    assert trainer.strategy.checkpoint_io is own
    trainer = trainer_for(FederatedLoop(), tmp_path / "b", rounds=1)
    trainer.fit(Plain(), toy_data())
    assert isinstance(trainer.strategy.checkpoint_io, DurableCheckpointIO)


def fill_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is written does not get to the disk."""

    def fsync(number: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", fsync)


def test_a_full_disk_leaves_the_earlier_checkpoint_and_no_draft(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    io, path = DurableCheckpointIO(), tmp_path / "last.ckpt"
    io.save_checkpoint({"state_dict": {}, "round": 1}, path)
    fill_disk(monkeypatch)
    with pytest.raises(OSError, match="No space left on device.*last.ckpt"):
        io.save_checkpoint({"state_dict": {}, "round": 2}, path)
    assert [path.name for path in tmp_path.iterdir()] == ["last.ckpt"]
    assert io.load_checkpoint(path)["round"] == 1


def test_rows_that_cannot_be_added_leave_the_file_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "rows.csv"
    append(path, b"first\n")
    fill_disk(monkeypatch)
    with pytest.raises(OSError, match=r"No space left on device.*rows.csv"):
        append(path, b"second\n")
    assert path.read_bytes() == b"first\n"


def test_an_exception_while_writing_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"before")

    def interrupted() -> None:
        with replacing(path) as file:
            file.write(b"half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert files(tmp_path) == {"file": b"before"}


@pytest.mark.slow
def test_a_disk_that_takes_no_more_ends_the_run_with_one_line(tmp_path: Path) -> None:
    """A limit on the size of files stands for the disk: below that of a checkpoint, above that of the CSV."""
    arguments = ["fit", "--config", QUICKSTART, "--trainer.default_root_dir", str(tmp_path), *QUIET]
    arguments += ["--trainer.logger", "false", "--trainer.max_epochs"]
    assert main([*arguments, "1"]) == 0
    before = {name: content for name, content in files(tmp_path).items() if name.endswith(".ckpt")}
    assert len(before) == 2
    code = (
        "import resource, sys; from flsv.cli import main\n"
        f"resource.setrlimit(resource.RLIMIT_FSIZE, ({min(map(len, before.values())) - 1},) * 2)\n"
        "sys.exit(main(sys.argv[1:]))"
    )
    command = [sys.executable, "-c", code, *arguments, "2", "--ckpt_path", "last"]
    run = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent.parent)
    assert run.returncode == 1, run.stderr
    (line,) = [line for line in run.stderr.splitlines() if line.startswith("flsv: error:")]
    assert "File too large" in line
    assert ".ckpt" in line
    assert "Traceback" not in run.stderr
    assert {name: content for name, content in files(tmp_path).items() if "ckpt" in name} == before
    assert main([*arguments, "2", "--ckpt_path", "last"]) == 0


@pytest.mark.slow
def test_a_kill_while_a_checkpoint_is_written_leaves_the_earlier_one(tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    DurableCheckpointIO().save_checkpoint({"state_dict": {}, "round": 1}, path)
    code = (
        "import os, signal, sys\n"
        "from flsv._lightning.round_boundary import DurableCheckpointIO\n"
        "os.fsync = lambda number: os.kill(os.getpid(), signal.SIGKILL)\n"
        "DurableCheckpointIO().save_checkpoint({'state_dict': {}, 'round': 2}, sys.argv[1])"
    )
    command = [sys.executable, "-c", code, str(path)]
    assert subprocess.run(command, cwd=Path(__file__).parent.parent).returncode == -9
    assert DurableCheckpointIO().load_checkpoint(path)["round"] == 1
    DurableCheckpointIO().save_checkpoint({"state_dict": {}, "round": 3}, path)  # over the draft that was left
    assert list(files(tmp_path)) == ["last.ckpt"]


class Hostile:
    def __reduce__(self) -> Any:
        return os.mkdir, ("hostile",)


def test_what_would_run_code_is_not_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"state_dict": {}, "x": Hostile()}, "hostile.ckpt")
    with pytest.raises(ConfigurationError, match="objects that may run code .* weights_only=False"):
        fit(FederatedLoop(), tmp_path, ckpt_path="hostile.ckpt")
    assert not Path("hostile").exists()
