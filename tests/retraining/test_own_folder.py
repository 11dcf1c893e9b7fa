"""What a coalition writes is its own: the files of a program are those of its run, to the byte."""

import errno
import multiprocessing
import os
import shutil
import signal
import socket
import sqlite3
import subprocess
import tempfile
import threading
from contextlib import chdir, closing
from pathlib import Path

import numpy as np
import pytest
import torch

from flsv.retraining.own_folder import ProgramFolder


def entries(folder):
    """Return the content, mode and target of each entry of a folder, by path."""
    entry_by_path = {}
    for path in folder.rglob("*"):
        content = path.read_bytes() if path.is_file() else None
        target = os.readlink(path) if path.is_symlink() else None
        entry_by_path[str(path.relative_to(folder))] = content, path.lstat().st_mode, target
    return entry_by_path


def contents(folder):
    """Return the contents of a folder's files by path, also of those in folders to which there are links."""
    content_by_path = {}
    for parent, folders, names in os.walk(folder, followlinks=True):
        folders[:] = [name for name in folders if name != "itself"]
        for name in names:
            path = Path(parent, name)
            if path.exists():
                content_by_path[os.path.relpath(path, folder)] = path.read_bytes()
    return content_by_path


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
        Path("data").mkdir()
        Path("data/a.txt").write_text("a")
        yield folder


def append(folder):
    with open(folder / "log.csv", "a") as file:
        file.write("more\n")


def append_by_a_descriptor(folder):
    descriptor = os.open(folder / "log.csv", os.O_WRONLY | os.O_APPEND)
    os.write(descriptor, b"more\n")
    os.close(descriptor)


def replace(folder):
    (folder / "new.csv").write_text("more\n")
    os.replace(folder / "new.csv", folder / "log.csv")


def copy_with_an_old_time(folder):
    (folder / "source").write_text("more\n")
    os.utime(folder / "source", (0, 0))
    shutil.copy2(folder / "source", folder / "log.csv")


def write_an_array(folder):
    array = np.memmap(folder / "log.csv", dtype=np.uint8)  # mode r+
    array[0] = 0
    array.flush()


def write_a_database(folder):
    with closing(sqlite3.connect(folder / "table.db")) as connection:
        connection.execute("create table if not exists t (x)")
        connection.execute("insert into t values (1)")
        connection.commit()


def move_a_folder(folder):
    os.rename(folder / "data", folder / "moved")
    (folder / "moved" / "a.txt").write_text("more")


def write_in_a_thread(folder):
    thread = threading.Thread(target=append, args=[folder])
    thread.start()
    thread.join()


def write_in_a_fork(folder):
    process = multiprocessing.get_context("fork").Process(target=append, args=[folder])
    process.start()
    process.join()
    assert process.exitcode == 0


def write_in_another_folder(folder):
    with chdir(folder / "data"):
        Path("a.txt").write_text("more")
        Path("../log.csv").unlink()


def write_in_a_temporary_folder(folder):
    with tempfile.TemporaryDirectory(dir=folder) as temporary_folder:
        Path(temporary_folder, "x").write_text("x")


def link_and_write(folder):
    os.link(folder / "log.csv", folder / "linked.csv")
    (folder / "linked.csv").write_text("more\n")
    os.symlink(folder / "data", folder / "way")
    (folder / "way" / "a.txt").write_text("more")


def replace_a_folder_by_a_file(folder):
    shutil.rmtree(folder / "data")
    (folder / "data").write_text("a file")
    (folder / "log.csv").unlink()
    (folder / "log.csv").mkdir()


#: Functions that write into a folder.
WRITES = {
    "a file that is a link": lambda folder: torch.save(torch.ones(2), folder / "final.pt"),
    "a file in a linked folder": lambda folder: torch.save(
        torch.ones(2), folder / "out/weights.pt"
    ),
    "a new file in an empty folder": lambda folder: (folder / "empty/new").touch(),
    "a log": append,
    "a log by a descriptor": append_by_a_descriptor,
    "a log in a thread": write_in_a_thread,
    "a log in a fork, as workers of a DataLoader are": write_in_a_fork,
    "a shorter file": lambda folder: os.truncate(folder / "log.csv", 1),
    "a file in place of another": replace,
    "a file with an old time": copy_with_an_old_time,
    "a file at a link that led nowhere": lambda folder: (folder / "nowhere").write_text("x"),
    "an array in memory": write_an_array,
    "a database": write_a_database,
    "new folders": lambda folder: (folder / "data/new/folder").mkdir(parents=True),
    "a moved folder": move_a_folder,
    "a temporary folder": write_in_a_temporary_folder,
    "files by paths relative to another folder": write_in_another_folder,
    "links": link_and_write,
    "a folder in place of a file": replace_a_folder_by_a_file,
    "another mode": lambda folder: (folder / "log.csv").chmod(0o600),
    "a removed folder": lambda folder: shutil.rmtree(folder / "empty"),
    "a removed file": lambda folder: os.unlink(folder / "log.csv"),
}


@pytest.mark.fast_rows
@pytest.mark.parametrize("is_elsewhere", [False, True], ids=["own", "elsewhere"])
@pytest.mark.parametrize("write", WRITES.values(), ids=list(WRITES))
def test_what_a_coalition_writes_changes_no_file(
    program,
    tmp_path,
    write,
    is_elsewhere,
):
    initial_entries = entries(tmp_path)
    folder = ProgramFolder()

    for _ in range(2):  # the second finds what the first has found
        with folder.entered():
            assert Path("../data/table.csv").read_text() == "a,b\n"
            assert Path("log.csv").read_text() == "earlier\n"
            assert Path("final.pt").read_text() == "earlier"
            assert Path("out/weights.pt").read_text() == "earlier"
            assert Path("empty").is_dir()
            write(program if is_elsewhere else Path("."))

        assert entries(tmp_path) == initial_entries
        assert folder.changed_files == []
    assert Path.cwd() == program


@pytest.mark.parametrize("write", WRITES.values(), ids=list(WRITES))
def test_what_the_run_writes_is_not_there_in_a_coalition(program, tmp_path, write):
    for path in (program / "final.pt", program / "out/weights.pt"):
        content = path.read_bytes()
        path.unlink()
        path.write_bytes(content)  # a file that no other name links to
    initial_contents = contents(program)
    folder = ProgramFolder()
    folder.begin_run()

    write(Path("."))
    entries_of_run = entries(tmp_path)
    folder.end_run()
    folder.take_over_run()
    with folder.entered() as own_folder:
        assert contents(own_folder) == initial_contents
        write(Path("."))

    assert entries(tmp_path) == entries_of_run


def test_folders_beside_many_others_are_linked_when_they_are_opened(program, monkeypatch):
    monkeypatch.setattr("flsv.retraining.own_folder.MAX_NEIGHBORS", 0)
    initial_entries = entries(program.parent)
    folder = ProgramFolder()
    folder.begin_run()
    (program / "data" / "of_run.txt").write_text("x")
    folder.take_over_run()

    for _ in range(2):
        with folder.entered():
            assert Path("data/a.txt").read_text() == "a"
            assert not Path("data/of_run.txt").exists()
            assert Path("../data/table.csv").read_text() == "a,b\n"
            Path("data/a.txt").write_text("more")
            Path("data/b.txt").write_text("more")
            Path("empty").rmdir()

    folder.end_run()
    (program / "data" / "of_run.txt").unlink()
    assert entries(program.parent) == initial_entries


@pytest.mark.parametrize("name", ["log.csv", "nowhere", "data/a.txt"])
def test_large_file_is_read_by_its_link_and_named_if_it_is_changed(program, monkeypatch, name):
    (program / "nowhere").unlink()
    for path in (program / "nowhere", program / "data/a.txt"):
        path.write_text("earlier\n")
    monkeypatch.setattr("flsv.utilities.file_writes.MAX_COPIED_BYTES", 0)
    folder = ProgramFolder()

    for path in (Path(name), program / name):
        (program / name).write_text("earlier\n")
        with folder.entered():
            assert np.memmap(path, dtype=np.uint8).tobytes() == b"earlier\n"
            assert Path(name).is_symlink() or path.is_absolute()
        assert folder.changed_files == []

        with folder.entered(), open(path, "r+") as file:
            file.write(f"{path} more")
        assert folder.changed_files == [f"the file {program / name}"]


def test_what_python_does_not_know_to_be_written_is_a_copy(program):
    folder = ProgramFolder()
    subprocess.run("echo more >> log.csv; echo more >> data/a.txt", shell=True, check=True)
    contents_of_run = contents(program)
    folder.take_over_run()

    for _ in range(2):
        with folder.entered():
            assert Path("log.csv").read_text() == "earlier\nmore\n"
            subprocess.run(
                "echo again >> log.csv; echo again >> data/a.txt", shell=True, check=True
            )

    assert contents(program) == contents_of_run


def test_threads_of_the_run_write_while_a_coalition_trains(program, tmp_path):
    """Such as one that writes checkpoints."""
    begins = threading.Event()

    def write_later():
        begins.wait()
        (tmp_path / "checkpoint").write_text("x")

    thread = threading.Thread(target=write_later)
    thread.start()
    with ProgramFolder().entered():
        begins.set()
        thread.join()

    assert (tmp_path / "checkpoint").read_text() == "x"


def test_full_disk_fails_a_coalition_and_no_run(program, tmp_path, monkeypatch):
    def fail(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    (tmp_path / "history.csv").write_text("earlier\n")
    folder = ProgramFolder()
    folder.begin_run()
    monkeypatch.setattr("flsv.utilities.file_writes.shutil.copy2", fail)
    Path("log.csv").write_text("of the run")

    with pytest.raises(OSError, match="No space"), folder.entered():
        (tmp_path / "history.csv").write_text("of a coalition")

    folder.end_run()
    assert (tmp_path / "history.csv").read_text() == "earlier\n"
    assert Path("log.csv").read_text() == "of the run"


def test_killed_coalition_is_put_back_when_another_begins(program, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    history = tmp_path / "history.csv"
    history.write_text("earlier\n")

    def train_and_die():
        with ProgramFolder().entered():
            history.write_text("of a coalition")
            os.kill(os.getpid(), signal.SIGKILL)

    process = multiprocessing.get_context("fork").Process(target=train_and_die)
    process.start()
    process.join()
    assert history.read_text() == "of a coalition"
    ProgramFolder()

    assert history.read_text() == "earlier\n"
    assert not list(tmp_path.glob("flsv-*"))


def test_nobody_is_told_of_writes_after_a_run(program):
    folder = ProgramFolder()
    folder.begin_run()
    folder.end_run()
    append(program)
    folder.take_over_run()

    with folder.entered():  # found by its time
        assert Path("log.csv").read_text() == "earlier\nmore\n"
    assert not Path(folder._home, "run").exists()


def bind_a_socket():
    with closing(socket.socket(socket.AF_UNIX)) as listener:
        listener.bind("service.sock")


def make_a_pipe():
    os.mkfifo("service.sock")


@pytest.mark.parametrize("make", [bind_a_socket, make_a_pipe])
@pytest.mark.usefixtures("program")
def test_sockets_and_pipes_that_another_program_changes_during_the_run_are_not_copied(make):
    make()
    folder = ProgramFolder()
    os.chmod("service.sock", 0o600)

    folder.take_over_run()

    with folder.entered() as own_folder:
        assert Path(own_folder, "log.csv").read_text() == "earlier\n"


@pytest.mark.usefixtures("program")
def test_file_that_vanishes_after_the_run_is_not_copied():
    folder = ProgramFolder()
    draft = Path("log.csv")
    draft.write_text("draft of another program")
    folder.take_over_run()
    draft.unlink()

    with folder.entered() as own_folder:
        assert Path(own_folder, "data", "a.txt").read_text() == "a"
