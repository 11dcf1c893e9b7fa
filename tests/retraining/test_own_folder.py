"""What a coalition writes is its own: the files of a program are those of its run, to the byte."""

import os
import shutil
from contextlib import chdir
from pathlib import Path

import pytest
import torch

from flsv import FederatedLoop
from flsv.retraining.own_folder import ProgramFolder
from helpers import warns
from helpers.fits import fit
from helpers.hidden_state import SEED, Base, fit_valued, make_data


def contents(*folders):
    bytes_by_path = {}
    for folder in folders:
        for path in folder.rglob("*"):
            if path.is_file():
                bytes_by_path[path] = path.read_bytes()
    return bytes_by_path


@pytest.fixture
def program(tmp_path):
    """A program's folder, with what an earlier run has left and links to other folders."""
    elsewhere = tmp_path / "scratch"
    elsewhere.mkdir()
    (elsewhere / "weights.pt").write_text("earlier")
    folder = tmp_path / "project" / "scripts"
    folder.mkdir(parents=True)
    (tmp_path / "project" / "data").mkdir()
    (tmp_path / "project" / "data" / "table.csv").write_text("a,b\n")
    with chdir(folder):
        Path("out").symlink_to(elsewhere)
        Path("final.pt").symlink_to(elsewhere / "weights.pt")
        Path("itself").symlink_to(folder)
        Path("nowhere").symlink_to("not_there")
        Path("log.csv").write_text("earlier\n")
        os.utime("log.csv", (0, 0))
        Path("empty").mkdir()
        yield folder


def append_to_log():
    with open("log.csv", "a") as file:
        file.write("more\n")


def replace_log():
    Path("new.csv").write_text("more\n")
    os.replace("new.csv", "log.csv")


def copy_with_an_old_time():
    Path("source").write_text("more\n")
    os.utime("source", (0, 0))
    shutil.copy2("source", "log.csv")


WRITES = {
    "a file that is a link": lambda: torch.save(torch.ones(2), "final.pt"),
    "a file in a linked folder": lambda: torch.save(torch.ones(2), "out/weights.pt"),
    "a new file in an empty folder": lambda: Path("empty/new").touch(),
    "a log": append_to_log,
    "a file in place of another": replace_log,
    "a file with an old time": copy_with_an_old_time,
    "a file at the end of a link that led nowhere": lambda: Path("nowhere").write_text("x"),
    "a removed folder": lambda: shutil.rmtree("empty"),
    "a removed file": lambda: os.unlink("log.csv"),
}


@pytest.mark.fast_rows
@pytest.mark.parametrize("write", WRITES.values(), ids=list(WRITES))
def test_what_is_written_in_a_coalitions_folder_changes_no_other(
    program,
    tmp_path,
    write,
):
    initial_contents = contents(tmp_path)
    folder = ProgramFolder()

    for _ in range(2):  # the second finds what the first has found
        with folder.entered():
            assert Path("../data/table.csv").read_text() == "a,b\n"
            assert Path("log.csv").read_text() == "earlier\n"
            assert Path("final.pt").read_text() == "earlier"
            assert Path("out/weights.pt").read_text() == "earlier"
            assert Path("empty").is_dir()
            write()

    assert contents(tmp_path) == initial_contents
    assert Path.cwd() == program


def test_large_file_that_is_written_is_named(program, monkeypatch):
    monkeypatch.setattr("flsv.retraining.own_folder.MAX_COPIED_BYTES", 0)
    folder = ProgramFolder()

    with folder.entered():
        append_to_log()

    assert folder.changed_files == [f"the file {program / 'log.csv'}"]
    with folder.entered():
        pass
    assert folder.changed_files == []


class WritesFiles(Base):
    """Writes by relative paths and by one that its constructor has made absolute. Trains by what is in a file."""

    def __init__(self):
        super().__init__()
        self.best_path = Path.cwd() / "best.pt"
        self.history = os.path.join(os.getcwd(), "history.txt")

    def training_step(self, batch, batch_idx):
        with open(self.history, "a") as file:
            file.write(".")
        file_size = os.path.getsize(self.history)
        divisor = 1 + 0.1 * file_size
        return super().training_step(batch, batch_idx) / divisor

    def on_train_epoch_end(self):
        torch.save(self.state_dict(), self.best_path)
        torch.save(self.state_dict(), "last.pt")

    def on_train_end(self):
        torch.save(self.state_dict(), "final.pt")


@pytest.mark.slow
def test_files_of_a_run_are_those_without_the_metric(tmp_path):
    for name in ("plain", "valued"):
        (tmp_path / name).mkdir()
    with chdir(tmp_path / "plain"):
        fit(FederatedLoop(seed=SEED), Path("run"), WritesFiles(), make_data(), rounds=2)

    with chdir(tmp_path / "valued"), warns("clients train otherwise"):
        loop = fit_valued(Path("run"), WritesFiles())

    assert loop.contributions["shadow"].isfinite().all()
    for name in ("best.pt", "last.pt", "final.pt", "history.txt"):
        plain_file = tmp_path / "plain" / name
        valued_file = tmp_path / "valued" / name
        assert valued_file.read_bytes() == plain_file.read_bytes()
