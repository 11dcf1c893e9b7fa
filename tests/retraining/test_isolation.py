"""Coalitions are fits with a view of files of their own: they read the user's, and write none of them."""

import hashlib
import mmap
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.loggers.logger import DummyLogger
from torch import Tensor

from flsv import FederatedLoop, Reporting
from flsv.sampling import FixedCohort
from helpers import slow_except
from helpers.fits import state_vector, trainer_for
from helpers.hidden_state import SEED, Base, make_data, utility_of_module
from helpers.recorded import Recorded

ROUNDS = 3


class SavesBest(L.Callback):
    """Keeps the best model in a file, and delivers that."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.best = float("inf")

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        # By the distance to 0.9 the best model is not always the last.
        distance = abs(float(trainer.callback_metrics["val_loss"]) - 0.9)
        if distance < self.best:
            self.best = distance
            torch.save(pl_module.state_dict(), self.path)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        pl_module.load_state_dict(torch.load(self.path, weights_only=True))


class WritesMore(L.Callback):
    """Writes as people do: a log that is open, files by round, a table, a folder."""

    def __init__(self) -> None:
        self.lines = open("log.txt", "a")  # noqa: SIM115 - until the end
        self.lines.write("begun\n")

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.lines.write(f"{trainer.current_epoch} {float(trainer.callback_metrics['val_loss'])}\n")
        torch.save(state_vector(pl_module), f"epoch{trainer.current_epoch}.pt")
        Path("models").mkdir(exist_ok=True)

        with Path("models", "table.csv").open("a") as file:
            file.write(f"{float(state_vector(pl_module).sum())}\n")

        self.lines.flush()


class ReadsFiles(Base):
    """Its samples' weights lie in a folder, and are read when they are needed."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return float(Path("data/train/weight.txt").read_text()) * self.loss(batch)


class ReadsAndWritesAFile(Base):
    """Reads what it has written into a file that is open for both.

    One byte of the file is the loss's weight in percent, and every step writes the next step's weight there.
    """

    def __init__(self) -> None:
        super().__init__()
        self.file = open("numbers.bin", "w+b")  # noqa: SIM115 - until the end
        self.file.write(bytes(range(100, 200)))
        self.file.flush()
        self.file.seek(3)  # the byte 103

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        weight = self.read_byte() / 100
        # Any rule does by which all weights hang on the number of steps.
        next_byte = int(99 + 100 * weight) // 2 + 40
        self.write_byte(next_byte)
        return weight * self.loss(batch)

    def read_byte(self) -> int:
        (byte,) = self.file.read(1)
        self.file.seek(-1, os.SEEK_CUR)
        return byte

    def write_byte(self, byte: int) -> None:
        self.file.write(bytes([byte]))
        self.file.flush()
        self.file.seek(-1, os.SEEK_CUR)


class CountsInAMappedFile(Base):
    def __init__(self) -> None:
        super().__init__()
        self.counts = np.memmap("counts.bin", dtype="int64", mode="w+", shape=(2,))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.counts[0] += 1
        return self.loss(batch) * (1 + 0.02 * float(self.counts[0]))


class CountsInSharedMemory(CountsInAMappedFile):
    def __init__(self) -> None:
        super().__init__()
        self.counts = np.frombuffer(mmap.mmap(-1, 4096), dtype="int64")


class DrawsPictures(Base):
    """Draws pictures into the folder of its logger."""

    def on_validation_end(self) -> None:
        folder = os.path.join(self.logger.log_dir, "pictures")  # type: ignore[union-attr, arg-type]
        os.makedirs(folder, exist_ok=True)
        torch.save(0, os.path.join(folder, f"{self.current_epoch}.pt"))


class LoggerWithoutFolder(DummyLogger):
    """As that of a service."""


@pytest.fixture
def folder_of_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's folder, in which the process works."""
    return fill_folder(tmp_path / "user", monkeypatch)


def fill_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (folder / "data" / "train").mkdir(parents=True)
    (folder / "data" / "train" / "weight.txt").write_text("0.7")
    (folder / "best.pt").write_bytes(b"the user's")
    monkeypatch.chdir(folder)
    return folder


#: Makes a module and the callbacks of its trainer.
MakesModule = Callable[[], tuple[Any, list[L.Callback]]]


def fit_kind(
    make: MakesModule,
    folder: Path,
    shadow: bool = False,
    members: tuple[int, ...] | None = None,
    **options: Any,
) -> tuple[Any, Any]:
    loop_options: dict[str, Any] = {
        "seed": SEED,
        "reporting": Reporting(table=False, files=False),
    }
    if shadow:
        metric = Recorded(coalitions="singles", performance="negative_loss")
        loop_options["metrics"] = {"shadow": metric}
    if members is not None:
        loop_options["sampler"] = FixedCohort(members)

    module, callbacks = make()
    loop = FederatedLoop(**loop_options)
    trainer = trainer_for(loop, folder, ROUNDS, callbacks=callbacks, **options)
    trainer.fit(module, make_data())
    return loop, module


def read_files(folder: Path) -> dict[str, str]:
    hashes = {}
    for path in folder.rglob("*"):
        if path.is_file():
            digest = hashlib.sha256(path.read_bytes()).hexdigest()
            hashes[str(path.relative_to(folder))] = digest
    return hashes


def assert_as_plain_fits(
    make: MakesModule, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **options: Any
) -> None:
    """The metric's coalitions equal plain fits of the members, each in a folder of its own; the user's files are those
    of a run without the metric."""
    expected = []
    files_of_plain_fits = []
    for members in (None, (0,), (1,), (2,)):  # None: all three clients
        user_folder = fill_folder(tmp_path / f"plain {members}", monkeypatch)
        _, module = fit_kind(make, user_folder / "root", members=members, **options)
        expected.append(utility_of_module(module))
        files_of_plain_fits.append(read_files(user_folder))

    user_folder = fill_folder(tmp_path / "user", monkeypatch)
    loop, module = fit_kind(make, user_folder / "root", shadow=True, **options)

    _, *utilities = loop.metrics["shadow"].game  # the first is that of the untrained model
    torch.testing.assert_close(
        torch.stack(utilities), torch.tensor(expected).double(), rtol=0, atol=1e-6
    )
    assert utility_of_module(module) == expected[0]
    assert read_files(user_folder) == files_of_plain_fits[0]


KINDS: dict[str, MakesModule] = {
    "a best model": lambda: (Base(), [SavesBest("best.pt")]),
    "a best model by its absolute path": lambda: (Base(), [SavesBest(os.path.abspath("best.pt"))]),
    "a best model elsewhere": lambda: (Base(), [SavesBest(os.path.abspath("../best.pt"))]),
    "a best model in a new folder": lambda: (Base(), [MakesFolder(), SavesBest("new/best.pt")]),
    "logs and tables": lambda: (Base(), [WritesMore()]),
    "files that are read": lambda: (ReadsFiles(), []),
    "a file open for both": lambda: (ReadsAndWritesAFile(), []),
    "a file in memory": lambda: (CountsInAMappedFile(), []),
    "shared memory": lambda: (CountsInSharedMemory(), []),
}


class MakesFolder(L.Callback):
    def setup(self, *_: Any, **__: Any) -> None:
        Path("new").mkdir(exist_ok=True)


@pytest.mark.parametrize("name", slow_except(["logs and tables", "files that are read"], KINDS))
def test_coalitions_read_and_write_separate_files(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert_as_plain_fits(KINDS[name], tmp_path, monkeypatch)


@pytest.mark.parametrize(
    "logger", [lambda: CSVLogger("logs"), lambda: LoggerOfAService()], ids=["files", "a service"]
)
def test_module_writes_into_the_folder_of_its_logger(
    logger: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    user_folder = fill_folder(tmp_path / "user", monkeypatch)
    loop, _ = fit_kind(
        lambda: (DrawsPictures(), []),
        user_folder,
        shadow=True,
        logger=logger(),
    )

    assert not loop.contributions["shadow"].isnan().any()


class LoggerOfAService(LoggerWithoutFolder):
    @property
    def log_dir(self) -> str:
        return "service"


def test_trainer_without_a_loggers_folder_trains_coalitions(folder_of_user: Path) -> None:
    for logger in (False, LoggerWithoutFolder()):
        loop, _ = fit_kind(lambda: (Base(), []), folder_of_user, shadow=True, logger=logger)
        assert not loop.contributions["shadow"].isnan().any()


def test_nothing_is_left_in_the_runs_folder_or_among_temporary_files(
    folder_of_user: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    loop = FederatedLoop(
        metrics={"shadow": Recorded(coalitions="singles")},
        seed=SEED,
        reporting=Reporting(table=False),
    )
    (temporary / ".coalitions").mkdir()
    (temporary / ".coalitions" / "left").touch()  # by a run that was killed
    trainer_for(loop, folder_of_user / "root", ROUNDS).fit(Base(), make_data())

    assert not loop.contributions["shadow"].isnan().any()
    assert not list(temporary.iterdir())
    assert not [*(folder_of_user / "root").rglob(".coalitions*")]


def refuse_private_file_views(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let forked coalitions be unable to write into files of their own."""

    def refuse(*_: Any) -> None:
        raise OSError("not here")

    monkeypatch.setattr("flsv.retraining.forked_fits.own_view", refuse)


@pytest.mark.parametrize("name", ["a best model", "logs and tables", "a best model elsewhere"])
def test_file_writes_are_refused_by_name_without_a_private_file_view(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain_folder = fill_folder(tmp_path / "plain", monkeypatch)
    fit_kind(KINDS[name], plain_folder / "root")

    refuse_private_file_views(monkeypatch)
    switch = "flsv.retraining.after_the_run.SavedBeginning.switch_to_fresh_processes"
    monkeypatch.setattr(switch, lambda *_: None)  # fresh processes have a view of their own
    user_folder = fill_folder(tmp_path / "user", monkeypatch)
    with pytest.warns(UserWarning, match=r"no values.*it writes .*(best|epoch0)\.pt"):
        loop, _ = fit_kind(KINDS[name], user_folder / "root", shadow=True)

    assert loop.contributions["shadow"].isnan().all()
    assert read_files(user_folder) == read_files(plain_folder)


def test_coalitions_read_files_without_a_private_file_view(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_private_file_views(monkeypatch)
    assert_as_plain_fits(KINDS["files that are read"], tmp_path, monkeypatch)


@pytest.mark.slow
def test_write_into_the_systems_folders_is_named(folder_of_user: Path) -> None:
    with pytest.warns(UserWarning, match=r"it writes '?/etc/flsv-test"):
        loop, _ = fit_kind(
            lambda: (Base(), [WritesIntoEtc(os.getpid())]), folder_of_user, shadow=True
        )
    assert loop.contributions["shadow"].isnan().all()


class WritesIntoEtc(L.Callback):
    """Writes in every process but its owner."""

    def __init__(self, owner: int) -> None:
        self.owner = owner

    def on_train_epoch_end(self, *_: Any) -> None:
        if os.getpid() != self.owner:
            Path("/etc/flsv-test").write_text("")


class NeverEndsOfClient1(Base):
    """Trains for ever where client 1 trains alone."""

    def on_train_epoch_start(self) -> None:
        (loop,) = (
            callback
            for callback in self.trainer.callbacks  # type: ignore[attr-defined]
            if isinstance(callback, FederatedLoop)
        )
        while loop.state.cohort == [1]:
            pass


@pytest.mark.slow
@pytest.mark.long
def test_coalition_that_never_ends_is_named_also_of_a_fresh_process(
    folder_of_user: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("flsv.retraining.forked_fits.EXTRA_SECONDS", 30)
    monkeypatch.setattr("flsv.retraining.forked_fits.TIME_LIMIT_FACTOR", 0)
    caplog.set_level("INFO", "lightning.pytorch")

    with pytest.warns(
        UserWarning, match=r"1 coalition failed to train, client 1: it took longer than 30 s"
    ):
        loop, _ = fit_kind(lambda: (NeverEndsOfClient1(), []), folder_of_user, shadow=True)

    assert "fresh processes, since forks have failed (it took longer than 30 s)" in caplog.text
    assert loop.contributions["shadow"].isnan().all()
