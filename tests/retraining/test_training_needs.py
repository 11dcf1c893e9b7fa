"""Before a coalition is trained it is decided whether its fit needs validations, or callbacks that save or stop."""

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, LambdaCallback, ModelCheckpoint

from flsv.retraining.training_needs import depends_on_validations, reads_checkpoints
from helpers.fits import plain_trainer
from zoo.logged import TrainsByValidationLoss
from zoo.program import Base, fit_valued
from zoo.scores import EndsWithItsBest


class SetsItsWeightAfterValidations(Base):
    def on_validation_epoch_end(self):
        self.weight = 0.5


class EndsWithTheTrainersBest(Base):
    def on_train_end(self):
        def load():
            return torch.load(self.trainer.checkpoint_callback.best_model_path)

        self.load_state_dict(load()["state_dict"])


class CountsBatches(L.Callback):
    def __init__(self):
        self.num_batches = 0

    def on_train_batch_end(self, *_):
        self.num_batches += 1


def module_with_its_callback():
    module = EndsWithItsBest()
    module.configure_callbacks()
    return module


@pytest.mark.parametrize(
    ("make_module", "make_callback", "is_validated", "has_checkpoints"),
    [
        (Base, None, False, False),
        (Base, lambda: EarlyStopping("val_loss"), False, False),
        (Base, ModelCheckpoint, False, False),
        (Base, CountsBatches, True, False),
        (Base, lambda: LambdaCallback(on_train_batch_end=print), False, False),
        (Base, lambda: LambdaCallback(on_validation_end=print), True, False),
        (SetsItsWeightAfterValidations, None, True, False),
        (TrainsByValidationLoss, None, True, False),
        (EndsWithTheTrainersBest, ModelCheckpoint, False, True),
        (module_with_its_callback, None, False, True),
    ],
)
def test_what_training_may_read_is_seen_in_the_programs_code(
    tmp_path, make_module, make_callback, is_validated, has_checkpoints
):
    callbacks = [make_callback()] if make_callback else []
    trainer = plain_trainer(tmp_path, callbacks=callbacks, enable_checkpointing=True)
    module = make_module()

    assert depends_on_validations(trainer, module) is is_validated
    assert reads_checkpoints(trainer, module) is has_checkpoints


class WeighsByValidation(Base):
    def training_step(self, batch, batch_idx):
        loss_of_validation = self.trainer.callback_metrics.get("val_loss", 0.5)
        return super().training_step(batch, batch_idx) * (0.5 + float(loss_of_validation))


def weight_by_validation(trainer):
    return 0.5 + float(trainer.callback_metrics.get("val_loss", 0.5))


class WeighsByFunction(Base):
    """Reads the loss in a function, which is not part of its code."""

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) * weight_by_validation(self.trainer)


@pytest.mark.slow
def test_coalition_whose_code_does_not_show_that_it_reads_validations_is_trained_with_them(
    tmp_path,
):
    values = fit_valued(tmp_path / "shown", WeighsByValidation()).contributions["shadow"]
    other_values = fit_valued(tmp_path / "hidden", WeighsByFunction()).contributions["shadow"]
    values_without = fit_valued(tmp_path / "plain", Base()).contributions["shadow"]

    assert torch.equal(other_values, values)
    assert not torch.equal(values_without, values)
