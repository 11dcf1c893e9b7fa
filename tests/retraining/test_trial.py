"""A trial before the first round shows what coalitions need, and what fails."""

import os
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from torch import Tensor

from flsv import FederatedLoop, Reporting
from flsv.metrics import ShadowShapley
from flsv.utilities.errors import ConfigurationError
from helpers.fits import trainer_for
from helpers.hidden_state import (
    SEED,
    Base,
    Kind,
    fit_members_alone,
    fit_with_values,
    make_data,
)
from helpers.models import loop_of

ALONE = (2,)


def make_loop(metrics: dict[str, Any]) -> FederatedLoop:
    return FederatedLoop(
        metrics=metrics,
        seed=SEED,
        reporting=Reporting(table=False),
    )


def fit(
    folder: Path,
    module: Any,
    callbacks: Sequence[Any] = (),
    **trainer_options: Any,
) -> Any:
    metric = ShadowShapley(coalitions="singles")
    loop = make_loop({"shadow": metric})
    trainer = trainer_for(
        loop,
        folder,
        rounds=2,
        callbacks=list(callbacks),
        **trainer_options,
    )
    trainer.fit(module, make_data())
    return loop


# ---- validations


class PatienceByHand(Base):
    """Trains less after two validations without progress."""

    num_bad_rounds = 0
    best_loss = 9.0

    def on_train_epoch_start(self):
        loss = self.trainer.callback_metrics.get("val_loss")
        if loss is None:
            return
        if float(loss) < self.best_loss - 0.4:
            self.best_loss = float(loss)
        else:
            self.num_bad_rounds += 1
        if self.num_bad_rounds >= 2:
            self.weight = 0.3


class PatienceInSteps(Base):
    """The same, by what its validation steps have kept."""

    def __init__(self):
        super().__init__()
        self.losses: list[float] = []

    def validation_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("val_loss", loss)
        self.losses.append(float(loss))
        if len(self.losses) > 5:
            self.weight = 0.3


class LoadsBest(L.Callback):
    """Ends with the best weights of a ModelCheckpoint, if there is one."""

    def on_train_end(
        self,
        trainer,
        pl_module,
    ):
        checkpoint: Any = trainer.checkpoint_callback
        if checkpoint is not None:
            best = torch.load(checkpoint.best_model_path, weights_only=True)
            pl_module.load_state_dict(best["state_dict"])


class Worsens(Base):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        factor = 1.0 if self.current_epoch < 2 else -0.3
        return factor * loss


def saves_best() -> ModelCheckpoint:
    folder = tempfile.mkdtemp()
    return ModelCheckpoint(
        folder,
        monitor="val_loss",
        save_top_k=1,
    )


class SavesAndLoadsBest(LoadsBest):
    """Adds the ModelCheckpoint before any trainer is asked for it."""

    def __init__(self):
        self.checkpoint = saves_best()

    def on_train_end(
        self,
        trainer,
        pl_module,
    ):
        best_path = self.checkpoint.best_model_path
        best = torch.load(best_path, weights_only=True)
        pl_module.load_state_dict(best["state_dict"])


KINDS = {
    "by logged values": Kind(PatienceByHand, rounds=6),
    "in validation steps": Kind(PatienceInSteps, rounds=6),
}


@pytest.mark.parametrize("kind", KINDS.values(), ids=list(KINDS))
def test_training_that_depends_on_later_validations_is_that_of_members_alone(kind):
    values = fit_with_values(kind)

    assert values.doubts == []
    members_alone = fit_members_alone(kind, ALONE)
    assert values.game[ALONE] == pytest.approx(members_alone.utility, abs=1e-6)


class WithBest(Worsens):
    def configure_callbacks(self):
        return [saves_best()]


class HoldsBest(Worsens):
    def configure_callbacks(self):
        holder = SavesAndLoadsBest()
        return [holder, holder.checkpoint]


MODULE_AND_CALLBACK = [
    (WithBest, LoadsBest),
    (HoldsBest, None),
]


@pytest.mark.parametrize(("module", "callback"), MODULE_AND_CALLBACK)
def test_coalition_ends_with_the_best_weights_of_its_own_checkpoint(
    module,
    callback,
):
    kind = Kind(module, callback, rounds=4)

    values = fit_with_values(kind)

    assert values.doubts == []
    members_alone = fit_members_alone(kind, ALONE)
    assert values.game[ALONE] == pytest.approx(members_alone.utility, abs=1e-6)


def test_callbacks_that_nothing_reads_save_and_stop_in_no_coalition(tmp_path):
    saved: list[str] = []

    class Saves(Base):
        def on_save_checkpoint(self, checkpoint):
            saved.append(os.getcwd())

    callbacks = [
        saves_best(),
        EarlyStopping("val_loss", patience=50),
    ]
    fit(
        tmp_path,
        Saves(),
        callbacks=callbacks,
        enable_checkpointing=True,
    )

    saved_in_copies = []
    for folder in saved:
        if folder != os.getcwd():
            saved_in_copies.append(folder)
    assert len(saved_in_copies) == 1, "in the trial"


# ---- what fails


class Node:
    """Refers to others that refer to it, in sets that ask for its name."""

    def __init__(self, name: str):
        self.name = name
        self.neighbours: set[Node] = set()

    def __hash__(self) -> int:
        return hash(self.name)


def make_ring() -> Node:
    node = Node("a")
    neighbour = Node("b")
    node.neighbours.add(neighbour)
    neighbour.neighbours.add(node)
    return node


class Holds(L.Callback):
    def __init__(self, part: Any):
        self.part = part


class FailsTwice(L.Callback):
    """Makes a folder that may not be there."""

    def __init__(self, folder: Path):
        self.folder = folder

    def on_fit_start(
        self,
        trainer,
        pl_module,
    ):
        self.folder.mkdir()


class NeverTrains(Base):
    def training_step(self, batch, batch_idx):
        raise AssertionError("it is trained")


class FailsAtTheEnd(Base):
    def on_train_end(self):
        raise LookupError("no such thing")


def test_part_that_pickles_and_does_not_load_is_refused_by_its_path(tmp_path):
    callback = Holds(make_ring())
    message = r"Holds\.part .Node. cannot be pickled and loaded"

    with pytest.raises(ConfigurationError, match=message):
        fit(tmp_path, NeverTrains(), callbacks=[callback])


LAYERS: list[tuple[Any]] = []


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

    def loss(self, batch: Any) -> Tensor:
        for (layer,) in LAYERS:
            layer.memory = 0.0
        return super().loss(batch)


def test_training_that_fails_at_a_clients_second_batch_is_refused(tmp_path):
    with pytest.raises(ConfigurationError, match="RuntimeError: .*second time|size of tensor"):
        fit(tmp_path, CarriesInARound())


def test_error_at_the_end_of_a_fit_is_seen_before_the_first_round(tmp_path):
    with pytest.raises(ConfigurationError, match=r"test_trial.py:\d+ .on_train_end.: LookupError"):
        fit(tmp_path, FailsAtTheEnd())


def test_lock_of_a_callback_is_free_in_a_coalition(tmp_path):
    lock = threading.Lock()
    callback = Holds(lock)

    with lock:
        loop = fit(tmp_path, Base(), callbacks=[callback])

    assert loop.contributions["shadow"].isfinite().all()


def test_callback_that_acts_outside_can_be_left_out(tmp_path):
    metric = ShadowShapley(coalitions="singles", leave_out=["FailsTwice"])
    loop = make_loop({"shadow": metric})
    folder = Path(tempfile.mkdtemp(), "once")
    callback = FailsTwice(folder)
    trainer = trainer_for(
        loop,
        tmp_path,
        rounds=2,
        callbacks=[callback],
    )

    trainer.fit(Base(), make_data())

    assert loop.contributions["shadow"].isfinite().all()


# ---- loggers


class AsksLogger(Base):
    def on_train_start(self):
        logger: Any = self.logger
        assert isinstance(logger, TensorBoardLogger)
        writer = logger.experiment
        writer.add_scalar("a", 1.0, global_step=0)
        Path(logger.log_dir).mkdir(parents=True, exist_ok=True)
        file = Path(writer.log_dir, "own.txt")
        file.write_text(f"{logger.name}")
        assert logger.version == "v1"


def test_logger_of_a_copy_is_of_its_class_and_logs_nothing(tmp_path):
    loggers = [
        TensorBoardLogger(tmp_path, "logs", version="v1"),
        CSVLogger(tmp_path, "other"),
    ]

    loop = fit(tmp_path, AsksLogger(), logger=loggers)

    assert loop.contributions["shadow"].isfinite().all()
    files = list(tmp_path.rglob("own.txt"))
    assert len(files) == 1


# ---- what the program keeps

HISTORY: list[int] = []


class Remembers(Base):
    num_fits = 0

    def on_train_epoch_end(self):
        HISTORY.append(self.current_epoch)
        Remembers.num_fits += 1
        os.environ["FLSV_TEST_FITS"] = str(Remembers.num_fits)


def test_globals_class_attributes_and_environment_are_those_of_the_run(
    tmp_path,
    monkeypatch,
):
    monkeypatch.setenv("FLSV_TEST_FITS", "0")
    HISTORY.clear()
    Remembers.num_fits = 0

    fit(tmp_path, Remembers())

    assert HISTORY == [0, 1]
    assert Remembers.num_fits == 2
    assert os.environ["FLSV_TEST_FITS"] == "2"


NETS: dict[str, Any] = {}


class Registered(Base):
    """Trains by the module that a registry holds in a tuple, which in a coalition is the run's."""

    def __init__(self):
        super().__init__()
        NETS["teachers"] = (self,)

    def loss(self, batch: Any) -> Tensor:
        (teacher,) = NETS["teachers"]
        with torch.no_grad():
            teacher.net(batch[0])
        return super().loss(batch)


def test_weights_of_the_run_that_coalitions_reach_are_written_back(tmp_path):
    module = Registered()
    loop = make_loop(metrics={})
    trainer = trainer_for(loop, tmp_path / "plain", rounds=2)
    trainer.fit(module, make_data())
    weights = {}
    for name, value in module.state_dict().items():
        weights[name] = value.clone()

    valued_module = Registered()
    with pytest.warns(UserWarning, match="have changed while coalitions were trained"):
        fit(tmp_path / "valued", valued_module)

    for name, value in valued_module.state_dict().items():
        assert torch.equal(value, weights[name])


# ---- waiting


class WaitsAlone(Base):
    """Waits for ever in the second round of a coalition of one client."""

    def on_train_epoch_start(self):
        if self.current_epoch == 0:
            return
        cohort = loop_of(self).state.cohort
        if len(cohort) == 1:
            threading.Event().wait()


def test_coalition_that_waits_for_ever_is_given_up_by_name(
    tmp_path,
    monkeypatch,
):
    monkeypatch.setattr("flsv.retraining.coalition_plan.MAX_EXTRA_WAIT", 1.0)
    message = "client 0, client 1, client 2: TimeoutError: it has begun"

    with pytest.warns(UserWarning, match=message):
        fit(tmp_path, WaitsAlone())
