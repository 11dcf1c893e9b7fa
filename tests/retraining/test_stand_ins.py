"""Training that reads a callback or a logger which only watches the run: values of plain fits, or the reader's name."""

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import (
    EarlyStopping,
    LearningRateMonitor,
    ModelCheckpoint,
    TQDMProgressBar,
)
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor

from flsv import FederatedLoop, Reporting
from flsv.retraining.coalition_fit import only_watches_the_run
from flsv.sampling import FixedCohort
from flsv.training.swapped_optimizer import is_optimizer
from helpers import slow_except
from helpers.coalitions_by_hand import forbid_forks
from helpers.fits import trainer_for
from helpers.hidden_state import SEED, Base, make_data, utility_of_module
from helpers.recorded import Recorded

ROUNDS = 3
Read = Callable[[L.Trainer, Path], float]


class Reads(Base):
    """Weighs its loss by what it reads before each round."""

    def __init__(self, read: Read, folder: Path) -> None:
        super().__init__()
        self.read = read
        self.folder = folder

    def on_train_epoch_start(self) -> None:
        self.weight = 1 + self.read(self.trainer, self.folder)


class DeliversBest(Base):
    def on_train_end(self) -> None:
        checkpoint: Any = self.trainer.checkpoint_callback
        if checkpoint is not None and checkpoint.best_model_path:
            path = checkpoint.best_model_path
            best = torch.load(path, weights_only=False)
            self.load_state_dict(best["state_dict"])


class Saves(ModelCheckpoint):
    """A checkpoint of one's own, by whose hook coalitions have it."""

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        super().on_validation_end(trainer, pl_module)


class ReadsMonitor(L.Callback):
    """Has its monitor by a reference of its own."""

    def __init__(self, monitor: Any) -> None:
        self.monitor = monitor

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        rates = self.monitor.lrs.get("lr-SGD", [])
        pl_module.weight = 1 + len(rates) / 10


def make_monitoring_callbacks() -> list[L.Callback]:
    monitor = LearningRateMonitor()
    return [ReadsMonitor(monitor), monitor]


def make_best_kind(kind: Any = ModelCheckpoint) -> Any:
    # The best model is not the last one.
    return lambda: [kind(monitor="val_loss", mode="max")]


def make_stopping_kind(**options: Any) -> Any:
    return lambda: [EarlyStopping("val_loss", mode="max", patience=9, **options)]


def best_score(trainer: Any, folder: Path) -> float:
    return float(trainer.checkpoint_callback.best_model_score or 0)


def state_of_checkpoints(trainer: Any, folder: Path) -> float:
    (checkpoint,) = trainer.checkpoint_callbacks
    state = checkpoint.state_dict()
    return len(state["best_k_models"]) / 10


def waited(trainer: Any, folder: Path) -> float:
    return trainer.early_stopping_callback.wait_count / 10  # type: ignore[no-any-return]


def stopped(trainer: Any, folder: Path) -> float:
    (callback,) = trainer.early_stopping_callbacks
    return vars(callback)["stopped_epoch"] + 0.1  # type: ignore[no-any-return]


def bars_batches(trainer: Any, folder: Path) -> float:
    bar = trainer.progress_bar_callback
    return 0.1 * (bar.trainer is trainer)


def class_of_the_logger(trainer: Any, folder: Path) -> float:
    logger = trainer.logger
    logger.experiment.log_metrics({"mine": 1.0})
    assert type(logger).__name__ == "CSVLogger"
    return 0.3 * isinstance(logger, CSVLogger)


def folder_of_the_logger(trainer: Any, folder: Path) -> float:
    log_folder = Path(trainer.logger.log_dir)
    parts = log_folder.relative_to(folder).parts
    return len(parts) / 10


def logged_before(trainer: Any, folder: Path) -> float:
    return len(trainer.logger.experiment.metrics) / 10


def version_of_the_logger(trainer: Any, folder: Path) -> float:
    return float(trainer.logger.version == 0)


#: The module or the function that reads, and the callbacks.
KINDS: dict[str, tuple[Any, ...]] = {
    "best_model_path": (DeliversBest, make_best_kind()),
    "best_model_path of a subclass": (DeliversBest, make_best_kind(Saves)),
    "best_model_score": (best_score, make_best_kind()),
    "the checkpoints' state": (state_of_checkpoints, make_best_kind()),
    "wait_count": (waited, make_stopping_kind()),
    "stopped_epoch": (stopped, make_stopping_kind()),
    "early stopping that stops": (waited, make_stopping_kind(stopping_threshold=0.0)),
    "lrs": (Base, make_monitoring_callbacks),
    "progress bar": (bars_batches, lambda: [TQDMProgressBar()]),
    "class of the logger": (class_of_the_logger, list),
    "log_dir": (folder_of_the_logger, list),
    "experiment": (logged_before, list),
    "version": (version_of_the_logger, list),
}


#: What is named where there are no values.
NAMED = {
    "experiment": r"logged_before \(.*reads CSVLogger.experiment.metrics",
    "version": r"version_of_the_logger \(.*reads CSVLogger.version",
}


def fit_members(
    kind: str, folder: Path, members: Any = None, shadow: bool = False
) -> tuple[Any, Any]:
    make, callbacks = KINDS[kind]
    is_module = isinstance(make, type)
    module = make() if is_module else Reads(make, folder)
    options: dict[str, Any] = {}
    if members is not None:
        options["sampler"] = FixedCohort(members)

    if shadow:
        metric = Recorded(coalitions="singles", performance="negative_loss")
        options["metrics"] = {"shadow": metric}

    silent = Reporting(table=False, files=False)
    loop = FederatedLoop(seed=SEED, reporting=silent, **options)
    trainer = trainer_for(
        loop,
        folder,
        ROUNDS,
        callbacks=callbacks(),
        logger=CSVLogger(folder),
        enable_checkpointing=True,
        enable_progress_bar=True,
    )
    trainer.fit(module, make_data())

    return loop, module


FAST = ("best_model_path", "lrs", "experiment")


@pytest.mark.parametrize("kind", slow_except(FAST, KINDS))
def test_values_are_those_of_plain_fits_or_the_reader_of_a_callback_is_named(
    kind: str, tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    loop, _ = fit_members(kind, tmp_path / "run", shadow=True)
    if kind in NAMED:
        assert loop.contributions["shadow"].isnan().all()
        messages = " ".join(str(warning.message) for warning in recwarn)
        assert re.search(f"no values.*{NAMED[kind]}", messages), messages
        return

    expected = []
    for members in (None, (0,), (1,), (2,)):
        _, plain = fit_members(kind, tmp_path / f"plain {members}", members)
        expected.append(utility_of_module(plain))

    game: Tensor = loop.metrics["shadow"].game
    utilities = game[1:].flatten()
    wanted = torch.tensor(expected).double()

    torch.testing.assert_close(
        utilities,
        wanted,
        rtol=0,
        atol=1e-6,
    )


@pytest.mark.slow
def test_fresh_processes_name_the_reader_of_a_callback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forbid_forks(monkeypatch)
    with pytest.warns(UserWarning, match="no values. DeliversBest.on_train_end .*best_model_path"):
        loop, _ = fit_members("best_model_path", tmp_path, shadow=True)
    assert loop.contributions["shadow"].isnan().all()


class StepThatFails:
    @property
    def step(self) -> int:
        raise ValueError("it has no step yet")


def test_attribute_whose_step_fails_is_no_optimizer() -> None:
    assert not is_optimizer(StepThatFails())


def run_the_hook(wrapped_hook: Any, *arguments: Any) -> None:
    """Run a hook as the loop of a federation does."""
    wrapped_hook(*arguments)


run_the_hook.__module__ = "flsv.any"


def test_callback_with_a_hook_of_the_program_does_more_than_watch() -> None:
    monitor: Any = LearningRateMonitor()
    monitor.on_train_end = [].append  # a method of C code
    assert not only_watches_the_run(monitor)

    # The loop wraps the hook while the federation runs.
    checkpoint: Any = ModelCheckpoint()
    checkpoint.on_train_batch_end = partial(run_the_hook, checkpoint.on_train_batch_end)
    assert only_watches_the_run(checkpoint)

    checkpoint_of_program: Any = ModelCheckpoint()
    checkpoint_of_program.on_train_batch_end = partial(run_the_hook, print_batch)
    assert not only_watches_the_run(checkpoint_of_program)


def print_batch(*arguments: Any) -> None:
    """Stands for a hook of the program."""
    print(arguments)
