"""Training that reads a callback or a logger which only watches the run: values of plain fits, or the reader's name."""

from collections.abc import Callable
from dataclasses import dataclass
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
#: Reads a number from a trainer, given the folder of its run.
ReadNumber = Callable[[L.Trainer, Path], float]


class WeighsByRead(Base):
    """Weighs its loss by what it reads before each round."""

    def __init__(self, read: ReadNumber, folder: Path) -> None:
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
            best_checkpoint = torch.load(path, weights_only=False)
            self.load_state_dict(best_checkpoint["state_dict"])


class CheckpointWithAHook(ModelCheckpoint):
    """A user's subclass. By its hook coalitions have it, too."""

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


def make_checkpoint(kind: Any = ModelCheckpoint) -> list[L.Callback]:
    # By mode="max" the best model is not the last one.
    return [kind(monitor="val_loss", mode="max")]


def make_early_stopping(**options: Any) -> list[L.Callback]:
    return [EarlyStopping("val_loss", mode="max", patience=9, **options)]


# What a module reads: each result is added to the weight of its loss.


def best_score(trainer: Any, folder: Path) -> float:
    return float(trainer.checkpoint_callback.best_model_score or 0)


def state_of_checkpoints(trainer: Any, folder: Path) -> float:
    (checkpoint,) = trainer.checkpoint_callbacks
    state = checkpoint.state_dict()
    return len(state["best_k_models"]) / 10


def wait_count(trainer: Any, folder: Path) -> float:
    return trainer.early_stopping_callback.wait_count / 10  # type: ignore[no-any-return]


def stopped_epoch(trainer: Any, folder: Path) -> float:
    (callback,) = trainer.early_stopping_callbacks
    return vars(callback)["stopped_epoch"] + 0.1  # type: ignore[no-any-return]


def trainer_of_the_progress_bar(trainer: Any, folder: Path) -> float:
    bar = trainer.progress_bar_callback
    return 0.1 if bar.trainer is trainer else 0.0


def class_of_the_logger(trainer: Any, folder: Path) -> float:
    logger = trainer.logger
    logger.experiment.log_metrics({"mine": 1.0})
    assert type(logger).__name__ == "CSVLogger"
    return 0.3 if isinstance(logger, CSVLogger) else 0.0


def folder_of_the_logger(trainer: Any, folder: Path) -> float:
    log_folder = Path(trainer.logger.log_dir)
    parts = log_folder.relative_to(folder).parts
    return len(parts) / 10


def number_of_logged_metrics(trainer: Any, folder: Path) -> float:
    return len(trainer.logger.experiment.metrics) / 10


def version_of_the_logger(trainer: Any, folder: Path) -> float:
    return 1.0 if trainer.logger.version == 0 else 0.0


@dataclass
class Kind:
    """How a module and its trainer's callbacks are made. With ``read`` the module weighs its loss by what it reads."""

    make_module: Callable[[], Base] | None = None
    read: ReadNumber | None = None
    make_callbacks: Callable[[], list[L.Callback]] = list


KINDS = {
    "best_model_path": Kind(DeliversBest, make_callbacks=make_checkpoint),
    "best_model_path of a subclass": Kind(
        DeliversBest, make_callbacks=partial(make_checkpoint, CheckpointWithAHook)
    ),
    "best_model_score": Kind(read=best_score, make_callbacks=make_checkpoint),
    "the checkpoints' state": Kind(read=state_of_checkpoints, make_callbacks=make_checkpoint),
    "wait_count": Kind(read=wait_count, make_callbacks=make_early_stopping),
    "stopped_epoch": Kind(read=stopped_epoch, make_callbacks=make_early_stopping),
    "early stopping that stops": Kind(
        read=wait_count, make_callbacks=partial(make_early_stopping, stopping_threshold=0.0)
    ),
    "lrs": Kind(Base, make_callbacks=make_monitoring_callbacks),
    "progress bar": Kind(
        read=trainer_of_the_progress_bar, make_callbacks=lambda: [TQDMProgressBar()]
    ),
    "class of the logger": Kind(read=class_of_the_logger),
    "log_dir": Kind(read=folder_of_the_logger),
    "experiment": Kind(read=number_of_logged_metrics),
    "version": Kind(read=version_of_the_logger),
}


#: What the message names of the kinds for which there are no values.
NAMED_IN_MESSAGE = {
    "experiment": r"number_of_logged_metrics \(.*reads CSVLogger.experiment.metrics",
    "version": r"version_of_the_logger \(.*reads CSVLogger.version",
}


def fit_members(
    name: str, folder: Path, members: Any = None, shadow: bool = False
) -> tuple[Any, Any]:
    kind = KINDS[name]
    if kind.make_module is not None:
        module = kind.make_module()
    else:
        assert kind.read is not None
        module = WeighsByRead(kind.read, folder)

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
        callbacks=kind.make_callbacks(),
        logger=CSVLogger(folder),
        enable_checkpointing=True,
        enable_progress_bar=True,
    )
    trainer.fit(module, make_data())

    return loop, module


KINDS_WITH_VALUES = [name for name in KINDS if name not in NAMED_IN_MESSAGE]
FAST = ("best_model_path", "lrs")


@pytest.mark.parametrize("name", slow_except(FAST, KINDS_WITH_VALUES))
def test_module_that_reads_a_callback_or_a_logger_has_the_values_of_plain_fits(
    name: str, tmp_path: Path
) -> None:
    loop, _ = fit_members(name, tmp_path / "run", shadow=True)

    expected = []
    for members in (None, (0,), (1,), (2,)):  # None: all three clients
        _, plain_module = fit_members(name, tmp_path / f"plain {members}", members)
        expected.append(utility_of_module(plain_module))

    game: Tensor = loop.metrics["shadow"].game
    utilities = game[1:].flatten()  # without that of the untrained model
    expected_utilities = torch.tensor(expected).double()
    torch.testing.assert_close(utilities, expected_utilities, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", slow_except(["experiment"], NAMED_IN_MESSAGE))
def test_module_that_reads_what_coalitions_have_not_is_named(name: str, tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=f"no values.*{NAMED_IN_MESSAGE[name]}"):
        loop, _ = fit_members(name, tmp_path / "run", shadow=True)
    assert loop.contributions["shadow"].isnan().all()


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
