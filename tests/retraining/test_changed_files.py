"""Training that reads, from its second round on, a file which the run has written: no values, and its name."""

import hashlib
import json
import mmap
import os
import shelve
import sqlite3
from collections.abc import Callable
from contextlib import closing
from multiprocessing import resource_tracker, shared_memory
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from flsv import FederatedLoop, Reporting
from flsv.metrics import ShadowShapley
from flsv.retraining.readings import file_time
from helpers import slow_except
from helpers.fits import trainer_for
from helpers.hidden_state import SEED, Base, make_data


def keep_in_json(round_index: int) -> None:
    path = Path("history.json")
    if path.exists():
        json.loads(path.read_text())
    path.write_text("[1]")


def append_line(round_index: int) -> None:
    with Path("history.csv").open("a") as file:
        file.write("1\n")
    if round_index:
        Path("history.csv").read_text()


def keep_in_sqlite(round_index: int) -> None:
    with closing(sqlite3.connect("history.db")) as database:
        database.execute("create table if not exists losses (loss real)")
        database.execute("insert into losses values (1)")
        database.commit()


def keep_in_shelf(round_index: int) -> None:
    with shelve.open("shelf") as shelf:
        shelf[str(round_index)] = 1


def keep_in_memory_map(round_index: int) -> None:
    mode: Any = "r+" if Path("map.bin").exists() else "w+"
    counts = np.memmap("map.bin", dtype="int64", mode=mode, shape=(2,))
    counts[0] += 1


def keep_in_anonymous_map(round_index: int) -> None:
    descriptor = os.open("bytes.bin", os.O_RDWR | os.O_CREAT)
    os.ftruncate(descriptor, mmap.PAGESIZE)
    with mmap.mmap(descriptor, mmap.PAGESIZE) as memory:
        memory[0] += 1
    os.close(descriptor)


def segment_of(folder: Path) -> Path:
    digest = hashlib.sha256(bytes(folder)).hexdigest()
    return Path("/dev/shm", f"flsv-test-{digest[:16]}")


def keep_in_shared_memory(round_index: int) -> None:
    path = segment_of(Path.cwd().parent)
    is_new = not path.exists()
    segment = shared_memory.SharedMemory(path.name, create=is_new, size=8)
    resource_tracker.unregister(segment._name, "shared_memory")  # type: ignore[attr-defined]
    segment.buf[0] += 1
    segment.close()


def keep_in_pipe(round_index: int) -> None:
    if not Path("pipe").exists():
        os.mkfifo("pipe")

    descriptor = os.open("pipe", os.O_RDWR)
    os.write(descriptor, b"1")
    os.read(descriptor, 1)
    os.close(descriptor)


def keep_by_torch(round_index: int) -> None:
    if Path("best.pt").exists():
        torch.load("best.pt", weights_only=True)
    else:
        torch.save(torch.zeros(1), "best.pt")


def keep_in_file_names(round_index: int) -> None:
    for path in Path("rounds").glob("*"):
        path.name.startswith("round")
    Path("rounds").mkdir(exist_ok=True)
    Path("rounds", f"round{round_index}").touch()


WAYS: dict[str, tuple[Callable[[int], None], str]] = {
    "JSON": (keep_in_json, "history.json"),
    "a line more": (append_line, "history.csv"),
    "SQLite": (keep_in_sqlite, "history.db"),
    "a shelf": (keep_in_shelf, "shelf"),
    "a memory map": (keep_in_memory_map, "map.bin"),
    "an anonymous map": (keep_in_anonymous_map, "bytes.bin"),
    "shared memory": (keep_in_shared_memory, "flsv-test-"),
    "a named pipe": (keep_in_pipe, "pipe"),
    "torch.load": (keep_by_torch, "best.pt"),
    "a listing": (keep_in_file_names, "round0"),
}


class Works(Base):
    def __init__(self, work: Callable[[int], None]) -> None:
        super().__init__()
        self.work = work

    def on_train_epoch_start(self) -> None:
        self.work(self.current_epoch)


def make_loop() -> FederatedLoop:
    metric = ShadowShapley(coalitions="singles")
    return FederatedLoop(
        metrics={"shadow": metric},
        seed=SEED,
        reporting=Reporting(table=False, files=False),
    )


@pytest.mark.parametrize("kind", slow_except(("a line more", "SQLite"), WAYS))
def test_read_of_a_file_that_the_run_has_changed_gives_no_values_and_its_name(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "user"
    folder.mkdir()
    monkeypatch.chdir(folder)
    segment_of(tmp_path).unlink(missing_ok=True)  # of an earlier run of this test
    work, name = WAYS[kind]
    loop = make_loop()
    message = f"no values.* reads '.*{name}.*changed since its first"

    with pytest.warns(UserWarning, match=message):
        trainer_for(loop, tmp_path / "run", 2).fit(Works(work), make_data())
    assert loop.contributions["shadow"].isnan().all()

    segment_of(tmp_path).unlink(missing_ok=True)


def test_file_time_lies_between_the_changes_before_it_and_after_it(tmp_path: Path) -> None:
    for repetition in range(20):
        earlier_file = tmp_path / f"before{repetition}"
        later_file = tmp_path / f"after{repetition}"

        earlier_file.touch()
        boundary = file_time()
        later_file.touch()

        assert earlier_file.stat().st_ctime <= boundary <= later_file.stat().st_ctime


def after_the_first(round_index: int) -> None:
    """Reads what a round of the same fit has written over all that was there."""
    path = Path("own.txt")
    if round_index:
        path.read_text()
    path.write_text("1")


def test_files_that_a_coalition_writes_anew_may_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    loop = make_loop()
    trainer_for(loop, tmp_path / "run", 2).fit(Works(after_the_first), make_data())
    assert not loop.contributions["shadow"].isnan().any()


def test_map_of_a_changed_file_that_is_open_before_the_fit_gives_no_values_and_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("counts.bin").write_bytes(bytes(16))
    counts = np.memmap("counts.bin", dtype="int64", mode="r")

    def read_map_and_write_file(round_index: int) -> None:
        assert counts[0] >= 0
        descriptor = os.open("counts.bin", os.O_WRONLY)
        os.write(descriptor, bytes([round_index]))
        os.close(descriptor)

    loop = make_loop()
    message = "no values.* an open file or memory map reads '.*counts.bin'.*changed since its first"
    with pytest.warns(UserWarning, match=message):
        trainer_for(loop, tmp_path / "run", 2).fit(Works(read_map_and_write_file), make_data())
    assert loop.contributions["shadow"].isnan().all()
