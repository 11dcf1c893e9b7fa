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
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from filelock import FileLock

from flsv.isolation.file_writes import files_put_back
from flsv.isolation.own_folder import ProgramFolder


def read_entries(folder):
    """Return the content, mode and target of each entry of a folder, by path."""
    entries = {}
    for path in folder.rglob("*"):
        content = path.read_bytes() if path.is_file() else None
        target = os.readlink(path) if path.is_symlink() else None
        entries[path.relative_to(folder)] = content, path.lstat().st_mode, target
    return entries


def read_contents(folder):
    """Return the contents of a folder's files by path, also of those in folders to which there are links."""
    contents = {}
    for parent, folders, names in os.walk(folder, followlinks=True):
        if "itself" in folders:
            folders.remove("itself")  # would be walked through without end
        for name in names:
            path = Path(parent, name)
            if path.exists():
                contents[path.relative_to(folder)] = path.read_bytes()
    return contents


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


def write_a_memory_mapped_file(folder):
    array = np.memmap(folder / "log.csv", dtype=np.uint8, mode="r+")
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


def run_in_a_fork(function, argument):
    """Return the exit code."""
    process = multiprocessing.get_context("fork").Process(target=function, args=[argument])
    process.start()
    process.join()
    return process.exitcode


def write_in_a_fork(folder):
    """As workers of a DataLoader do."""
    assert run_in_a_fork(append, folder) == 0


def write_in_another_folder(folder):
    """Write by paths relative to it."""
    with chdir(folder / "data"):
        Path("a.txt").write_text("more")
        Path("../log.csv").unlink()


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


def save_at_a_link(folder):
    torch.save(torch.ones(2), folder / "final.pt")


def save_in_a_linked_folder(folder):
    torch.save(torch.ones(2), folder / "out" / "weights.pt")


def save_at_a_link_that_led_nowhere(folder):
    (folder / "nowhere").write_text("x")


def make_a_file_in_an_empty_folder(folder):
    (folder / "empty" / "new").touch()


def make_folders(folder):
    (folder / "data" / "new" / "folder").mkdir(parents=True)


def shorten_a_file(folder):
    os.truncate(folder / "log.csv", 1)


def change_a_mode(folder):
    (folder / "log.csv").chmod(0o600)


def remove_a_folder(folder):
    shutil.rmtree(folder / "empty")


def remove_a_file(folder):
    os.unlink(folder / "log.csv")


WRITES = [
    save_at_a_link,
    save_in_a_linked_folder,
    save_at_a_link_that_led_nowhere,
    make_a_file_in_an_empty_folder,
    append,
    append_by_a_descriptor,
    write_in_a_thread,
    write_in_a_fork,
    shorten_a_file,
    replace,
    copy_with_an_old_time,
    write_a_memory_mapped_file,
    write_a_database,
    make_folders,
    move_a_folder,
    write_in_another_folder,
    link_and_write,
    replace_a_folder_by_a_file,
    change_a_mode,
    remove_a_folder,
    remove_a_file,
]


def assert_files_are_those_of_the_program():
    """Assert that the working folder has the files of the fixture ``program``."""
    assert Path("../data/table.csv").read_text() == "a,b\n"
    assert Path("log.csv").read_text() == "earlier\n"
    assert Path("final.pt").read_text() == "earlier"
    assert Path("out/weights.pt").read_text() == "earlier"
    assert Path("empty").is_dir()


def assert_coalitions_change_no_file(write, folder_of_writes, project_and_scratch):
    """Let two coalitions write, one after the other. Both must find the files of the run."""
    initial_entries = read_entries(project_and_scratch)
    folder = ProgramFolder()

    for _coalition in range(2):
        with folder.entered():
            assert_files_are_those_of_the_program()
            write(folder_of_writes)

        assert read_entries(project_and_scratch) == initial_entries
        assert folder.changed_files == []


@pytest.mark.parametrize("write", WRITES)
def test_writes_of_a_coalition_by_relative_paths_change_no_file(program, tmp_path, write):
    assert_coalitions_change_no_file(write, Path("."), tmp_path)
    assert Path.cwd() == program


@pytest.mark.fast_rows
@pytest.mark.parametrize("write", WRITES)
def test_writes_of_a_coalition_by_absolute_paths_change_no_file(program, tmp_path, write):
    assert_coalitions_change_no_file(write, program, tmp_path)


def write_anew(path):
    """Put a new file with the same content in the place of a file or a link."""
    content = path.read_bytes()
    path.unlink()
    path.write_bytes(content)


@pytest.mark.parametrize("write", WRITES)
def test_coalition_finds_files_as_they_were_before_the_run_wrote_them(program, tmp_path, write):
    write_anew(program / "final.pt")
    write_anew(program / "out/weights.pt")
    contents_before_run = read_contents(program)

    folder = ProgramFolder()
    folder.begin_run()
    write(Path("."))
    entries_after_run = read_entries(tmp_path)
    folder.end_run()

    folder.take_over_run()
    with folder.entered() as folder_of_coalition:
        assert read_contents(folder_of_coalition) == contents_before_run
        write(Path("."))
    assert read_entries(tmp_path) == entries_after_run


def test_folders_beside_many_others_are_linked_when_they_are_opened(program, monkeypatch):
    monkeypatch.setattr("flsv.isolation.own_folder.MAX_NEIGHBORS", 0)
    initial_entries = read_entries(program.parent)
    file_of_run = program / "data" / "of_run.txt"
    folder = ProgramFolder()
    folder.begin_run()
    file_of_run.write_text("x")
    folder.take_over_run()

    for _coalition in range(2):
        with folder.entered():
            assert Path("data/a.txt").read_text() == "a"
            assert not Path("data/of_run.txt").exists()
            assert Path("../data/table.csv").read_text() == "a,b\n"
            Path("data/a.txt").write_text("more")
            Path("data/b.txt").write_text("more")
            Path("empty").rmdir()

    folder.end_run()
    file_of_run.unlink()
    assert read_entries(program.parent) == initial_entries


@pytest.mark.parametrize("name", ["log.csv", "data/a.txt"])
@pytest.mark.parametrize("is_absolute", [False, True], ids=["relative", "absolute"])
def test_large_file_is_not_copied_and_is_named_if_it_is_changed(
    program, monkeypatch, name, is_absolute
):
    monkeypatch.setattr("flsv.isolation.file_writes.MAX_COPIED_BYTES", 0)
    path = program / name if is_absolute else Path(name)
    content = path.read_bytes()
    folder = ProgramFolder()

    with folder.entered():
        assert np.memmap(path, dtype=np.uint8).tobytes() == content
        assert Path(name).is_symlink() or is_absolute
    assert folder.changed_files == []

    with folder.entered(), open(path, "r+") as file:
        file.write("more")
    assert folder.changed_files == [f"the file {program / name}"]


def append_by_a_shell(row):
    """Write as another program does, of whose writes Python does not know."""
    subprocess.run(f"echo {row} >> log.csv; echo {row} >> data/a.txt", shell=True, check=True)


def test_files_that_other_programs_write_are_copied_into_the_own_folder(program):
    folder = ProgramFolder()
    append_by_a_shell("more")
    contents_of_run = read_contents(program)
    folder.take_over_run()

    for _coalition in range(2):
        with folder.entered():
            assert Path("log.csv").read_text() == "earlier\nmore\n"
            append_by_a_shell("again")

    assert read_contents(program) == contents_of_run


def test_thread_of_the_run_writes_while_a_coalition_trains(program, tmp_path):
    coalition_trains = threading.Event()

    def write_checkpoint():
        coalition_trains.wait()
        (tmp_path / "checkpoint").write_text("x")

    thread = threading.Thread(target=write_checkpoint)
    thread.start()
    with ProgramFolder().entered():
        coalition_trains.set()
        thread.join()

    assert (tmp_path / "checkpoint").read_text() == "x"


def test_full_disk_fails_a_coalition_and_no_run(program, tmp_path, monkeypatch):
    history = tmp_path / "history.csv"
    history.write_text("earlier\n")
    log = Path("log.csv")
    folder = ProgramFolder()
    folder.begin_run()
    # Of a file that a run or a coalition writes, what it was before is copied first.
    full_disk = OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr("flsv.isolation.file_writes.shutil.copy2", Mock(side_effect=full_disk))

    log.write_text("of the run")
    with pytest.raises(OSError, match="No space"), folder.entered():
        history.write_text("of a coalition")

    folder.end_run()
    assert history.read_text() == "earlier\n"
    assert log.read_text() == "of the run"


def write_and_die_in_a_coalition(path):
    with ProgramFolder().entered():
        path.write_text("of a coalition")
        os.kill(os.getpid(), signal.SIGKILL)


def test_files_of_a_killed_coalition_are_restored_when_another_begins(
    program, tmp_path, monkeypatch
):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    history = tmp_path / "history.csv"
    history.write_text("earlier\n")
    run_in_a_fork(write_and_die_in_a_coalition, history)
    assert history.read_text() == "of a coalition"

    ProgramFolder()

    assert history.read_text() == "earlier\n"
    assert not list(tmp_path.glob("flsv-*"))


def test_coalition_finds_what_is_written_after_a_run(program):
    folder = ProgramFolder()
    folder.begin_run()
    folder.end_run()
    append(program)
    folder.take_over_run()

    with folder.entered():
        assert Path("log.csv").read_text() == "earlier\nmore\n"
    folder_of_copies = Path(folder._home, "run")
    assert not folder_of_copies.exists()


def bind_a_socket():
    with closing(socket.socket(socket.AF_UNIX)) as listener:
        listener.bind("service.sock")


def make_a_pipe():
    os.mkfifo("service.sock")


@pytest.mark.parametrize("make_service", [bind_a_socket, make_a_pipe])
@pytest.mark.usefixtures("program")
def test_sockets_and_pipes_that_another_program_changes_during_the_run_are_not_copied(make_service):
    make_service()
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


@pytest.mark.parametrize("acquires_lock", [True, False], ids=["removed lock", "no lock"])
@pytest.mark.usefixtures("program")
def test_folder_that_another_process_removes_before_it_is_locked_is_made_anew(
    monkeypatch, tmp_path, acquires_lock
):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # without folders of other processes
    acquire = FileLock.acquire
    removed = []

    def removed_by_another_process(lock):
        if removed:
            return acquire(lock)
        if acquires_lock:
            acquire(lock)
        removed.append(Path(lock.lock_file).parent)
        shutil.rmtree(removed[0])
        if acquires_lock:
            return lock
        raise FileNotFoundError(lock.lock_file)

    monkeypatch.setattr(FileLock, "acquire", removed_by_another_process)
    folder = ProgramFolder()

    assert not removed[0].exists()
    with folder.entered() as own_folder:
        assert Path(own_folder, "log.csv").read_text() == "earlier\n"


def test_torch_saves_by_its_own_function_after_the_last_of_nested_contexts():
    own_function = torch.serialization._open_zipfile_writer

    with files_put_back():
        with files_put_back():
            pass
        assert torch.serialization._open_zipfile_writer is not own_function

    assert torch.serialization._open_zipfile_writer is own_function
