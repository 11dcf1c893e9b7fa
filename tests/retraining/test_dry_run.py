"""The dry run before the first round shows what coalitions need, and what fails."""

import os
import tempfile
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

from flsv import FederatedLoop
from flsv.metrics import ShadowShapley
from helpers import refused, warns
from helpers.fits import fit, state_vector
from zoo.program import SEED, Base, fit_valued, make_data


@pytest.mark.slow
def test_checkpoint_and_early_stopping_that_nothing_reads_are_left_out_of_coalitions(tmp_path):
    # The dry run and each coalition have a working folder of their own.
    working_folders_of_saves = []

    class ModuleThatNotesWorkingFolderOfSaves(Base):
        def on_save_checkpoint(self, checkpoint):
            working_folders_of_saves.append(os.getcwd())

    module = ModuleThatNotesWorkingFolderOfSaves()
    checkpoint = ModelCheckpoint(tempfile.mkdtemp(), monitor="val_loss")
    early_stopping = EarlyStopping("val_loss", patience=50)

    loop = fit_valued(
        tmp_path, module, callbacks=[checkpoint, early_stopping], enable_checkpointing=True
    )

    folder_of_run = os.getcwd()
    saves_outside_of_run = [name for name in working_folders_of_saves if name != folder_of_run]
    num_saves_of_dry_run = 1
    assert len(saves_outside_of_run) == num_saves_of_dry_run
    # Without validations, which coalitions do not need, EarlyStopping would fail.
    assert loop.contributions["shadow"].isfinite().all()


# ---- errors

LAYERS = []


class LayerThatAddsItsLastOutput(torch.nn.Module):
    """Adds half of its last output, until ``memory`` is reset."""

    def __init__(self):
        super().__init__()
        self.memory: Any = 0.0
        LAYERS.append((self,))

    def forward(self, x):
        self.memory = x + 0.5 * self.memory
        return self.memory


class ModuleThatResetsLayersOfTheRun(Base):
    """A copy of it resets the layers of the run, and never its own: its second batch fails."""

    def __init__(self):
        super().__init__()
        self.net.insert(1, LayerThatAddsItsLastOutput())

    def loss(self, batch):
        for (layer,) in LAYERS:
            layer.memory = 0.0
        return super().loss(batch)


def test_training_that_fails_at_a_clients_second_batch_is_refused(tmp_path):
    with refused("RuntimeError: .*second time|size of tensor"):
        fit_valued(tmp_path, ModuleThatResetsLayersOfTheRun())


class ModuleThatFailsInOnTrainEnd(Base):
    def on_train_end(self):
        raise LookupError("no such thing")


def test_error_in_on_train_end_is_reported_before_the_first_round(tmp_path):
    with refused(r"test_dry_run.py:\d+ .on_train_end.: LookupError"):
        fit_valued(tmp_path, ModuleThatFailsInOnTrainEnd())


# ---- loggers


class ModuleThatWritesIntoItsLogFolder(Base):
    """Logs to TensorBoard, and writes a file beside its log."""

    def on_train_start(self):
        logger = self.logger
        assert isinstance(logger, TensorBoardLogger)
        assert logger.version == "v1"

        logger.experiment.add_scalar("a", 1.0, global_step=0)
        folder = Path(logger.log_dir)
        folder.mkdir(parents=True, exist_ok=True)
        Path(folder, "own.txt").write_text(logger.name)


@pytest.mark.slow
def test_logger_of_a_coalition_has_its_class_and_logs_nothing(tmp_path):
    loggers = [TensorBoardLogger(tmp_path, "logs", version="v1"), CSVLogger(tmp_path, "other")]

    loop = fit_valued(tmp_path, ModuleThatWritesIntoItsLogFolder(), logger=loggers)

    assert loop.contributions["shadow"].isfinite().all()
    (file_of_run,) = tmp_path.rglob("own.txt")
    assert file_of_run.read_text() == "logs"


# ---- state of the program

GLOBAL_LIST_OF_EPOCHS = []


class ModuleThatCountsEpochsInGlobalClassAndEnvironment(Base):
    num_epochs = 0

    def on_train_epoch_end(self):
        GLOBAL_LIST_OF_EPOCHS.append(self.current_epoch)
        type(self).num_epochs += 1
        os.environ["NUM_EPOCHS"] = str(type(self).num_epochs)


@pytest.mark.slow
def test_epochs_of_coalitions_are_not_counted_in_globals_classes_and_environment(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("NUM_EPOCHS", "0")
    module = ModuleThatCountsEpochsInGlobalClassAndEnvironment()
    monkeypatch.setattr(type(module), "num_epochs", 0)
    GLOBAL_LIST_OF_EPOCHS.clear()

    fit_valued(tmp_path, module, rounds=2)

    # A run of two rounds has two epochs.
    assert GLOBAL_LIST_OF_EPOCHS == [0, 1]
    assert type(module).num_epochs == 2
    assert os.environ["NUM_EPOCHS"] == "2"


TEACHERS = {}


class ModuleThatCallsItselfByARegistry(Base):
    """Calls the network that a global registry holds in a tuple, which in a coalition is the run's."""

    def __init__(self):
        super().__init__()
        TEACHERS["first"] = (self,)

    def loss(self, batch):
        (teacher,) = TEACHERS["first"]
        inputs, _labels = batch
        with torch.no_grad():
            teacher.net(inputs)
        return super().loss(batch)


@pytest.mark.slow
def test_weights_of_the_run_that_coalitions_change_are_restored(tmp_path):
    plain_module = ModuleThatCallsItselfByARegistry()
    fit(FederatedLoop(seed=SEED), tmp_path / "plain", plain_module, make_data(), rounds=2)

    valued_module = ModuleThatCallsItselfByARegistry()
    with warns("has changed the run's own module or optimizers"):
        fit_valued(tmp_path / "valued", valued_module)

    assert torch.equal(state_vector(valued_module), state_vector(plain_module))


# ---- callbacks that read a validation's values


class EarlyStoppingFromRound1(EarlyStopping):
    """Reads nothing in round 0, the only one of the dry run."""

    def on_train_epoch_end(self, trainer, pl_module):
        if trainer.current_epoch > 0:
            super().on_train_epoch_end(trainer, pl_module)


class CallbackThatHoldsAnEarlyStopping(L.Callback):
    def __init__(self):
        self.early_stopping = EarlyStopping("val_loss", patience=50)

    def setup(self, trainer, pl_module, stage):
        self.early_stopping.setup(trainer, pl_module, stage)

    def on_train_epoch_end(self, trainer, pl_module):
        self.early_stopping.on_train_epoch_end(trainer, pl_module)


class CallbackThatReadsTheValidationLoop(L.Callback):
    """Fails by an attribute that is None until Lightning validates."""

    def on_train_epoch_end(self, trainer, pl_module):
        validation = trainer.fit_loop.epoch_loop.val_loop
        assert validation._combined_loader.limits


@pytest.fixture(scope="module")
def values_without_callbacks(tmp_path_factory):
    loop = fit_valued(tmp_path_factory.mktemp("plain"), Base())
    return loop.contributions["shadow"]


@pytest.mark.by_turn
@pytest.mark.slow
@pytest.mark.parametrize(
    "make_callback",
    [
        lambda: EarlyStoppingFromRound1("val_loss", patience=50),
        CallbackThatHoldsAnEarlyStopping,
        CallbackThatReadsTheValidationLoop,
    ],
)
def test_callback_that_reads_validations_has_them_in_coalitions(
    tmp_path, values_without_callbacks, make_callback
):
    loop = fit_valued(tmp_path, Base(), callbacks=[make_callback()])

    assert values_without_callbacks.isfinite().all()
    assert torch.equal(loop.contributions["shadow"], values_without_callbacks)


class OwnPlateau(torch.optim.lr_scheduler.ReduceLROnPlateau):
    """A subclass, which Lightning does not know by its class."""


class ModuleWithLearningRateByValidation(Base):
    """After each validation but the first its learning rate is a tenth."""

    def __init__(self, strict):
        super().__init__()
        self.strict = strict

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        plateau = OwnPlateau(optimizer, patience=0, threshold=1e6, threshold_mode="abs")
        config = {"scheduler": plateau, "monitor": "val_loss", "strict": self.strict}
        return {"optimizer": optimizer, "lr_scheduler": config}


def fit_and_return_values(folder, module):
    metric = ShadowShapley(coalitions="singles", performance="negative_loss")
    loop = fit_valued(folder, module, rounds=3, metric=metric)
    return loop.contributions["shadow"]


@pytest.mark.slow
def test_schedule_that_lightning_skips_without_validations_has_them_in_coalitions(tmp_path):
    """Without validations Lightning raises an error for a strict schedule, and skips another one silently."""
    strict_module = ModuleWithLearningRateByValidation(strict=True)
    skipping_module = ModuleWithLearningRateByValidation(strict=False)

    values = fit_and_return_values(tmp_path / "strict", strict_module)
    values_if_skipping = fit_and_return_values(tmp_path / "skipping", skipping_module)
    values_by_constant_rate = fit_and_return_values(tmp_path / "constant", Base())

    assert values.isfinite().all()
    assert torch.equal(values, values_if_skipping)
    assert not torch.equal(values, values_by_constant_rate)
