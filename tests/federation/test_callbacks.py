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
from flsv.metrics import ClassSpecificShapley, CumulativeShapley
from flsv.server.checks import check_callbacks
from helpers import refused, warns
from helpers.data import CLASSES, toy_data
from helpers.fits import fit, plain_trainer, read_logged_metrics, state_vector
from helpers.models import Logs, Plain


def order_callbacks(is_before_loop, callback, loop):
    return [callback, loop] if is_before_loop else [loop, callback]


class LogsValidationSteps(Logs):
    def validation_step(self, batch, batch_idx):
        super().validation_step(batch, batch_idx)
        x, y = batch
        loss = nn.functional.cross_entropy(self(x), y)
        self.log("val_loss_step", loss, on_step=True, on_epoch=False)


def test_loggers_have_the_round_as_x_axis(tmp_path):
    module = LogsValidationSteps()
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
    callbacks = [
        *order_callbacks(is_before_loop, LambdaCallback(on_train_batch_end=time_is_up), loop),
        LambdaCallback(on_validation_start=record_model),
        best,
    ]
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


class Adds(Callback):
    """A module, as Lightning's fine-tuners for self-supervised networks."""

    def on_fit_start(self, trainer, pl_module):
        pl_module.head = nn.Linear(CLASSES, CLASSES)


@pytest.mark.slow
def test_callback_that_adds_a_module_must_come_before_the_loop(tmp_path):
    def fit_with_added_module(is_before_loop):
        loop = FederatedLoop(metrics={"game": CumulativeShapley()}, seed=1)
        callbacks = order_callbacks(is_before_loop, Adds(), loop)
        trainer = plain_trainer(tmp_path, rounds=1, callbacks=callbacks)
        trainer.fit(Logs(), toy_data())

    fit_with_added_module(is_before_loop=True)
    with refused(r"\['head.bias', 'head.weight'\] are new.* before FederatedLoop"):
        fit_with_added_module(is_before_loop=False)
