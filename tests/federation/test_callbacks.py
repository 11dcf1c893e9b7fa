"""Lightning's own callbacks beside the loop: what they see, save and monitor is the federation's, in any order."""

from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    BaseFinetuning,
    Callback,
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


def test_loggers_have_the_round_as_x_axis(tmp_path):
    module = LogsLossesOfSteps()
    data = toy_data(server_val=0.3, eval_batch_size=8)
    loop = FederatedLoop(metrics={"cssv": ClassSpecificShapley()}, seed=1)
    fit(loop, tmp_path, module, data, logger=CSVLogger(tmp_path))

    rows = read_logged_metrics(tmp_path)
    rounds_by_name = {}
    for name in (
        "train_loss_epoch",
        "train_loss_step",
        "val_acc",
        "val_loss_step",
        "cssv/client_1",
    ):
        rounds_by_name[name] = [int(row["step"]) for row in rows if row[name]]

    for name in ("train_loss_epoch", "val_acc", "cssv/client_1"):
        assert rounds_by_name[name] == [0, 1, 2]
    for name in ("train_loss_step", "val_loss_step"):
        rounds = rounds_by_name[name]
        num_batches = len(rounds) // 3
        assert num_batches > 1
        assert rounds == [0] * num_batches + [1] * num_batches + [2] * num_batches
    assert [row["epoch"] for row in rows] == [row["step"] for row in rows]
    assert "epoch" not in module.trainer.logged_metrics
    assert "step" not in module.trainer.callback_metrics


@pytest.mark.parametrize("is_before_loop", [True, False])
def test_training_that_stops_within_a_round_validates_no_client_model(tmp_path, is_before_loop):
    def time_is_up(trainer, *_):
        trainer.should_stop = trainer.global_step == 18

    models = []

    def record_model(trainer, module):
        models.append(state_vector(module))

    folder = tmp_path / "c"
    best = ModelCheckpoint(
        folder,
        "{epoch}-{step}",
        monitor="val_acc",
        mode="max",
        save_top_k=-1,
    )
    loop = FederatedLoop(seed=1)
    module = Plain()
    stopping = LambdaCallback(on_train_batch_end=time_is_up)
    loop_and_stopping = [stopping, loop] if is_before_loop else [loop, stopping]
    callbacks = [*loop_and_stopping, LambdaCallback(on_validation_start=record_model), best]
    trainer = plain_trainer(tmp_path, callbacks=callbacks, enable_checkpointing=True)

    with warns("round 2 is discarded") as caught:
        trainer.fit(module, toy_data())

    assert sum("discarded" in str(warning.message) for warning in caught) == 1
    assert loop.round_index == 1

    global_model = state_vector(module)
    for model in models:
        assert torch.equal(model, global_model)

    for path in folder.iterdir():
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
