"""A fork's own view of files: it reads what its parent has written, and its own writes stay with it."""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flsv.utilities import own_files
from flsv.utilities.forks import LIBC
from flsv.utilities.own_files import own_view
from flsv.utilities.supervisor import ChildFailed, supervise

NOBODY = 65534
SET_DUMPABLE = 4
SHARED = 0x104000  # MS_SHARED | MS_REC


def answer_of_fork(folder: Path, work: Callable[[], str]) -> str:
    """Return what ``work`` returns in a fork that has a view of its own."""
    mount_point = folder / "memory"
    mount_point.mkdir()
    mount_point.chmod(0o777)

    def work_in_view() -> str:
        own_view([], str(mount_point))
        return work()

    ((_, answer),) = supervise([("fork", work_in_view)])
    if isinstance(answer, ChildFailed):
        raise answer

    return str(answer)


def append_line(path: Path) -> str:
    with path.open("a") as file:
        file.write("fork")
    return path.read_text()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tmp_path.chmod(0o777)
    (tmp_path / "file").write_text("parent, ")
    (tmp_path / "file").chmod(0o666)
    return tmp_path


def test_writes_by_absolute_and_relative_paths_stay_with_the_fork(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)

    absolute = answer_of_fork(folder, lambda: append_line(folder / "file"))
    (folder / "memory").rmdir()
    relative = answer_of_fork(folder, lambda: append_line(Path("file")))

    assert absolute == relative == "parent, fork"
    assert (folder / "file").read_text() == "parent, "


def test_shared_memory_can_be_written_and_the_systems_folders_cannot(folder: Path) -> None:
    def write() -> str:
        with tempfile.TemporaryFile(dir="/dev/shm"):
            pass

        try:
            Path("/etc/flsv-test").touch()
        except OSError as error:
            return str(error.strerror)

        return "written"

    assert answer_of_fork(folder, write) == "Read-only file system"


original_mount = own_files._mount
original_enter = own_files._enter_new_mount_namespace


@pytest.fixture
def mounted(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on which a file system with one file is mounted, in the fork only."""
    path = folder / "mounted"
    path.mkdir()

    def enter_and_mount() -> None:
        original_enter()
        original_mount("tmpfs", str(path), "tmpfs")
        (path / "file").write_text("on the mounted file system")

    monkeypatch.setattr(own_files, "_enter_new_mount_namespace", enter_and_mount)
    return path


def refuse_overlays(source: str | None, target: str, *args: Any, **options: Any) -> None:
    """As on a file system that cannot be below an overlay."""
    if args == ("overlay",):
        raise OSError("no overlay on this file system")
    original_mount(source, target, *args, **options)


def test_mounted_folder_is_seen(folder: Path, mounted: Path) -> None:
    answer = answer_of_fork(folder, (mounted / "file").read_text)

    assert answer == "on the mounted file system"
    assert list(mounted.iterdir()) == []  # the parent has not mounted it


def test_mounted_folder_is_seen_without_an_overlay(
    folder: Path, mounted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def mount(source: str | None, target: str, *args: Any, **options: Any) -> None:
        if target == str(mounted):
            refuse_overlays(source, target, *args, **options)
        else:
            original_mount(source, target, *args, **options)

    monkeypatch.setattr(own_files, "_mount", mount)
    answer = answer_of_fork(folder, (mounted / "file").read_text)

    assert answer == "on the mounted file system"
    assert list(mounted.iterdir()) == []


def test_mounts_of_a_fork_are_seen_by_no_other_process(folder: Path) -> None:
    mounts = Path("/proc/self/mountinfo")

    def count_new_mounts() -> int:
        # Here the process has mounts that it shares with its forks, as after the start of most systems.
        own_files._enter_new_mount_namespace()
        own_files._mount(None, "/", None, flags=SHARED)
        num_mounts = len(mounts.read_text().splitlines())
        answer_of_fork(folder, str)
        return len(mounts.read_text().splitlines()) - num_mounts

    assert list(supervise([("outer", count_new_mounts)])) == [("outer", 0)]


def users_have_namespaces() -> bool:
    if os.getuid() != 0 or shutil.which("unshare") is None:
        return False
    return subprocess.run(["unshare", "--user", "true"], user=NOBODY).returncode == 0


@pytest.mark.skipif(not users_have_namespaces(), reason="root, and namespaces of users, are needed")
def test_a_user_without_rights_has_a_view_in_folders_below_those_of_others(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = folder / "others" / "work"
    work.mkdir(parents=True)
    (work / "file").write_text("parent, ")
    os.chown(work, NOBODY, NOBODY)
    os.chown(work / "file", NOBODY, NOBODY)

    for parent in work.parents[:-1]:
        parent.chmod(parent.stat().st_mode | 0o011)

    monkeypatch.chdir(work)
    enter = own_files._enter_new_mount_namespace

    def enter_as_nobody() -> None:
        os.setgid(NOBODY)
        os.setuid(NOBODY)
        assert LIBC is not None
        LIBC.prctl(SET_DUMPABLE, 1)  # otherwise /proc/self stays root's
        enter()

    monkeypatch.setattr(own_files, "_enter_new_mount_namespace", enter_as_nobody)

    answer = answer_of_fork(folder, lambda: append_line(work / "file"))

    assert answer == "parent, fork"
    assert (work / "file").read_text() == "parent, "
