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


def saves_best():
    return ModelCheckpoint(tempfile.mkdtemp(), monitor="val_loss")


@pytest.mark.slow
def test_callbacks_that_nothing_reads_save_and_stop_in_no_coalition(tmp_path):
    saved = []

    class Saves(Base):
        def on_save_checkpoint(self, checkpoint):
            saved.append(os.getcwd())

    callbacks = [
        saves_best(),
        EarlyStopping("val_loss", patience=50),
    ]
    fit_valued(tmp_path, Saves(), callbacks=callbacks, enable_checkpointing=True)

    saved_in_copies = []
    for folder in saved:
        if folder != os.getcwd():
            saved_in_copies.append(folder)
    assert len(saved_in_copies) == 1, "in the trial"


# ---- what fails


class FailsAtTheEnd(Base):
    def on_train_end(self):
        raise LookupError("no such thing")


LAYERS = []


class Carries(torch.nn.Module):
    """Adds a part of its last inputs, until all layers of the program are reset."""

    def __init__(self):
        super().__init__()
        self.memory: Any = 0.0
        LAYERS.append((self,))

    def forward(self, x):
        self.memory = x + 0.5 * self.memory
        return self.memory


class CarriesInARound(Base):
    """A copy of it resets the layers of the run, and never its own."""

    def __init__(self):
        super().__init__()
        self.net.insert(1, Carries())

    def loss(self, batch):
        for (layer,) in LAYERS:
            layer.memory = 0.0
        return super().loss(batch)


def test_training_that_fails_at_a_clients_second_batch_is_refused(tmp_path):
    with refused("RuntimeError: .*second time|size of tensor"):
        fit_valued(tmp_path, CarriesInARound())


def test_error_at_the_end_of_a_fit_is_seen_before_the_first_round(tmp_path):
    with refused(r"test_dry_run.py:\d+ .on_train_end.: LookupError"):
        fit_valued(tmp_path, FailsAtTheEnd())


# ---- loggers


class AsksLogger(Base):
    def on_train_start(self):
        logger = self.logger
        assert isinstance(logger, TensorBoardLogger)
        writer = logger.experiment
        writer.add_scalar("a", 1.0, global_step=0)
        Path(logger.log_dir).mkdir(parents=True, exist_ok=True)
        file = Path(writer.log_dir, "own.txt")
        file.write_text(f"{logger.name}")
        assert logger.version == "v1"


@pytest.mark.slow
def test_logger_of_a_copy_is_of_its_class_and_logs_nothing(tmp_path):
    loggers = [
        TensorBoardLogger(tmp_path, "logs", version="v1"),
        CSVLogger(tmp_path, "other"),
    ]

    loop = fit_valued(tmp_path, AsksLogger(), logger=loggers)

    assert loop.contributions["shadow"].isfinite().all()
    files = list(tmp_path.rglob("own.txt"))
    assert len(files) == 1


# ---- what the program keeps

HISTORY = []


class Remembers(Base):
    num_fits = 0

    def on_train_epoch_end(self):
        HISTORY.append(self.current_epoch)
        Remembers.num_fits += 1
        os.environ["FLSV_TEST_FITS"] = str(Remembers.num_fits)


@pytest.mark.slow
def test_globals_class_attributes_and_environment_are_those_of_the_run(
    tmp_path,
    monkeypatch,
):
    monkeypatch.setenv("FLSV_TEST_FITS", "0")
    HISTORY.clear()
    Remembers.num_fits = 0

    fit_valued(tmp_path, Remembers())

    assert HISTORY == [0, 1]
    assert Remembers.num_fits == 2
    assert os.environ["FLSV_TEST_FITS"] == "2"


NETS = {}


class Registered(Base):
    """Trains by the module that a registry holds in a tuple, which in a coalition is the run's."""

    def __init__(self):
        super().__init__()
        NETS["teachers"] = (self,)

    def loss(self, batch):
        (teacher,) = NETS["teachers"]
        with torch.no_grad():
            teacher.net(batch[0])
        return super().loss(batch)


@pytest.mark.slow
def test_weights_of_the_run_that_coalitions_reach_are_written_back(tmp_path):
    module = Registered()
    fit(FederatedLoop(seed=SEED), tmp_path / "plain", module, make_data(), rounds=2)
    weights = state_vector(module)

    valued_module = Registered()
    with warns("has changed the run's own module or optimizers"):
        fit_valued(tmp_path / "valued", valued_module)

    assert torch.equal(state_vector(valued_module), weights)


# ---- callbacks that read a validation's values


class Stops(EarlyStopping):
    """Overrides nothing."""


class StopsLate(EarlyStopping):
    """Reads nothing in the first round, the only one of the trial."""

    def on_train_epoch_end(self, trainer, pl_module):
        if trainer.current_epoch > 0:
            super().on_train_epoch_end(trainer, pl_module)


class HoldsEarlyStopping(L.Callback):
    def __init__(self):
        self.early_stopping = EarlyStopping("val_loss", patience=50)

    def setup(self, trainer, pl_module, stage):
        self.early_stopping.setup(trainer, pl_module, stage)

    def on_train_epoch_end(self, trainer, pl_module):
        self.early_stopping.on_train_epoch_end(trainer, pl_module)


class ReadsValidationLoop(L.Callback):
    """Fails by an attribute that is None until Lightning validates."""

    def on_train_epoch_end(self, trainer, pl_module):
        validation = trainer.fit_loop.epoch_loop.val_loop
        assert validation._combined_loader.limits


@pytest.fixture(scope="module")
def values_without_callbacks(tmp_path_factory):
    loop = fit_valued(tmp_path_factory.mktemp("plain"), Base())
    return loop.contributions["shadow"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "make_reader",
    [
        lambda: Stops("val_loss", patience=50),
        lambda: StopsLate("val_loss", patience=50),
        HoldsEarlyStopping,
        ReadsValidationLoop,
    ],
)
def test_callback_that_reads_validations_has_them_in_coalitions(
    tmp_path, values_without_callbacks, make_reader
):
    """The callback changes nothing."""
    loop = fit_valued(tmp_path, Base(), callbacks=[make_reader()])

    assert loop.contributions["shadow"].isfinite().all()
    assert torch.equal(loop.contributions["shadow"], values_without_callbacks)


class LowersItsRate(Base):
    """After each validation but the first its learning rate is a tenth, by a subclass of ReduceLROnPlateau."""

    class Plateau(torch.optim.lr_scheduler.ReduceLROnPlateau):
        pass

    def __init__(self, strict):
        super().__init__()
        self.strict = strict

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        plateau = self.Plateau(optimizer, patience=0, threshold=1e6, threshold_mode="abs")
        config = {"scheduler": plateau, "monitor": "val_loss", "strict": self.strict}
        return {"optimizer": optimizer, "lr_scheduler": config}


@pytest.mark.slow
def test_schedule_that_lightning_skips_without_validations_has_them_in_coalitions(tmp_path):
    """Without validations a strict schedule fails in the dry run. Another one would be skipped, without a word."""

    def values_of(name, module):
        metric = ShadowShapley(coalitions="singles", performance="negative_loss")
        loop = fit_valued(tmp_path / name, module, rounds=3, metric=metric)
        return loop.contributions["shadow"]

    values = values_of("strict", LowersItsRate(strict=True))
    assert values.isfinite().all()
    assert not torch.equal(values, values_of("constant", Base()))
    assert torch.equal(values, values_of("not_strict", LowersItsRate(strict=False)))
