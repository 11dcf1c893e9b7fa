"""Checkpoints are whole or not there: after a kill, on a full disk, wherever the temporary folder is."""

import errno
import os
from pathlib import Path

import pytest
import torch

from flsv._lightning.round_boundary import DurableCheckpointIO
from flsv.federation import FederatedLoop
from flsv.utilities.atomic_files import append, replacing
from helpers import refused
from helpers.data import toy_data
from helpers.fits import fit, trainer_for
from helpers.models import Plain


def test_checkpoint_is_drafted_in_its_target_folder_and_then_renamed(tmp_path, monkeypatch):
    """Not in the system's temporary folder, from which a move may be a copy."""
    renamed_files = []
    rename = os.replace

    def record_and_rename(source, target):
        renamed_files.append((Path(source), Path(target)))
        rename(source, target)

    monkeypatch.setattr(os, "replace", record_and_rename)
    trainer = trainer_for(FederatedLoop(), tmp_path / "run", rounds=1)
    trainer.fit(Plain(), toy_data())
    renamed_files.clear()
    path = tmp_path / "model.ckpt"

    trainer.save_checkpoint(path)

    ((draft, target),) = renamed_files
    files = [path for path in tmp_path.iterdir() if path.is_file()]
    assert draft.parent == tmp_path
    assert target == path
    assert files == [path]


def fill_disk(monkeypatch):
    """Let every write to the disk fail, as a full one does."""

    def fsync(number):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", fsync)


def test_a_full_disk_leaves_the_earlier_checkpoint_and_no_draft(tmp_path, monkeypatch):
    io = DurableCheckpointIO()
    path = tmp_path / "last.ckpt"
    io.save_checkpoint({"state_dict": {}, "round": 1}, path)
    fill_disk(monkeypatch)

    with pytest.raises(OSError, match="No space left on device.*last.ckpt"):
        io.save_checkpoint({"state_dict": {}, "round": 2}, path)

    assert [path.name for path in tmp_path.iterdir()] == ["last.ckpt"]
    assert io.load_checkpoint(path)["round"] == 1


def test_tensors_on_a_full_disk_raise_the_error_of_the_disk(tmp_path):
    """torch.save raises a RuntimeError after the error of the file."""

    class FullFile:
        def write(self, content):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        def flush(self):
            pass

    path = tmp_path / "outputs.pt"
    with pytest.raises(OSError, match=r"No space left on device.*outputs.pt"), replacing(path):
        torch.save({"outputs": torch.zeros(1000)}, FullFile())

    assert list(tmp_path.iterdir()) == []


def test_append_to_a_full_disk_leaves_the_file_unchanged(tmp_path, monkeypatch):
    path = tmp_path / "rows.csv"
    path.write_bytes(b"first\n")
    fill_disk(monkeypatch)

    with pytest.raises(OSError, match=r"No space left on device.*rows.csv"):
        append(path, b"second\n")

    assert path.read_bytes() == b"first\n"


class Hostile:
    def __reduce__(self):
        return os.mkdir, ("hostile",)


def test_checkpoint_that_would_run_code_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save({"state_dict": {}, "x": Hostile()}, "hostile.ckpt")
    with refused("objects that may run any code"):
        fit(FederatedLoop(), tmp_path, ckpt_path="hostile.ckpt")
    assert not Path("hostile").exists()
