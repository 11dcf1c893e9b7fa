"""Lightning's own callbacks beside the loop: what they see, save and monitor is the federation's, in any order."""

from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    BaseFinetuning,
    Callback,
    EarlyStopping,
    LambdaCallback,
    ModelCheckpoint,
)
from lightning.pytorch.loggers import CSVLogger
from torch import nn

from flsv.federation import FederatedLoop
from flsv.metrics import ClassSpecificShapley
from flsv.server.checks import check_callbacks
from helpers import warns
from helpers.data import toy_data
from helpers.fits import fit, plain_trainer, read_logged_metrics, state_vector
from helpers.models import Plain


class LogsLossesOfSteps(Plain):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        super().validation_step(batch, batch_idx)
        x, y = batch
        loss = nn.functional.cross_entropy(self(x), y)
        self.log("val_loss_step", loss, on_step=True, on_epoch=False)


@pytest.fixture(scope="module")
def logged_run(tmp_path_factory):
    """The Trainer of three rounds, and the rows that its logger has written."""
    folder = tmp_path_factory.mktemp("logged")
    data = toy_data(server_val=0.3, eval_batch_size=8)
    loop = FederatedLoop(metrics={"cssv": ClassSpecificShapley()}, seed=1)
    module = fit(loop, folder, LogsLossesOfSteps(), data, rounds=3, logger=CSVLogger(folder))
    return module.trainer, read_logged_metrics(folder)


def rounds_on_x_axis(rows, name):
    return [int(row["step"]) for row in rows if row[name]]


@pytest.mark.parametrize("name", ["train_loss_epoch", "val_acc", "cssv/client_1"])
def test_value_of_a_round_is_logged_at_its_round(logged_run, name):
    _, rows = logged_run
    assert rounds_on_x_axis(rows, name) == [0, 1, 2]


@pytest.mark.parametrize("name", ["train_loss_step", "val_loss_step"])
def test_values_of_steps_are_logged_at_their_round(logged_run, name):
    _, rows = logged_run
    rounds = rounds_on_x_axis(rows, name)
    num_batches = len(rounds) // 3

    assert num_batches > 1
    assert rounds == [0] * num_batches + [1] * num_batches + [2] * num_batches


def test_loggers_have_the_epoch_as_lightning_logs_it_and_metrics_have_not(logged_run):
    trainer, rows = logged_run
    assert [row["epoch"] for row in rows] == [row["step"] for row in rows]
    assert "epoch" not in trainer.logged_metrics
    assert "step" not in trainer.callback_metrics


def test_stop_before_min_epochs_ends_no_round_early(tmp_path):
    never_better = EarlyStopping("val_acc", patience=0, mode="max", min_delta=5.0)
    loop = FederatedLoop(seed=1)
    fit(loop, tmp_path, rounds=5, callbacks=[never_better], min_epochs=4)

    assert loop.round_index == 4


@pytest.mark.parametrize("is_before_loop", [True, False])
def test_training_that_stops_within_a_round_validates_no_client_model(tmp_path, is_before_loop):
    validated_models = []

    def stop_in_round_2(trainer, *_):
        trainer.should_stop = trainer.global_step == 18

    def record_model(trainer, module):
        validated_models.append(state_vector(module))

    loop = FederatedLoop(seed=1)
    stopping = LambdaCallback(on_train_batch_end=stop_in_round_2)
    recording = LambdaCallback(on_validation_start=record_model)
    saving = ModelCheckpoint(
        tmp_path / "saved", "{epoch}-{step}", monitor="val_acc", mode="max", save_top_k=-1
    )
    callbacks = [loop, recording, saving]
    callbacks.insert(0 if is_before_loop else 1, stopping)
    module = Plain()
    trainer = plain_trainer(tmp_path, callbacks=callbacks, enable_checkpointing=True)

    with warns("round 2 is discarded") as caught:
        trainer.fit(module, toy_data())

    assert sum("discarded" in str(warning.message) for warning in caught) == 1
    assert loop.round_index == 1

    global_model = state_vector(module)
    for model in validated_models:
        assert torch.equal(model, global_model)

    for path in (tmp_path / "saved").iterdir():
        saved = Plain()
        saved.load_state_dict(torch.load(path, weights_only=False)["state_dict"])
        assert torch.equal(state_vector(saved), global_model)


# ---- callbacks that change how a model is trained


def test_callbacks_that_change_optimizers_are_moved_right_after_the_loop():
    loop = FederatedLoop()
    one_callback = Callback()
    another_callback = Callback()
    thaws = BackboneFinetuning()
    freezes = BaseFinetuning()
    callbacks = [thaws, one_callback, freezes, loop, another_callback]
    trainer = SimpleNamespace(callbacks=callbacks)

    check_callbacks(trainer, loop)

    assert trainer.callbacks == [one_callback, loop, thaws, freezes, another_callback]
