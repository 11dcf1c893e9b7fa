"""The utility of any task: what a module logs when it validates, compared with Lightning's own validation."""

import copy
import itertools
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from games.all_coalitions import (
    MASKS,
    partition_in_three,
    play_all_coalitions,
    validate_with_lightning,
)
from lightning.pytorch.loggers import CSVLogger

from flsv._lightning.validation_run import store_batches
from flsv.core.parameter_space import ParameterSpace
from flsv.federation import FederatedLoop
from flsv.games import ValidatedModels
from flsv.metrics import GradientShapley, PartialFederatedShapley
from helpers import refused
from helpers.data import toy_data
from helpers.fits import fit
from helpers.models import Plain
from zoo.tasks import VAE, Autoencoder, Hooked, LanguageModel, Regression, SeveralLoaders


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (Regression, "val_worst"),
        (Regression, "val_total"),
        (Regression, "val_odd"),
        (Hooked, "val_loss_epoch"),
        (Hooked, "best"),
    ],
)
def test_value_logged_by_a_coalitions_model_is_what_lightning_would_log(kind, name, tmp_path):
    """Programs of ``tests/zoo/table.py`` are compared with Lightning, too."""
    module = kind()
    untrained_module = copy.deepcopy(module)  # coalitions are scored with its attributes
    values, vectors = play_all_coalitions(
        tmp_path, module, partition_in_three(kind.data()), performance=name, mode="max"
    )

    expected = []
    for vector in vectors:
        logged_values = validate_with_lightning(untrained_module, vector, kind.data(), tmp_path)
        expected.append(logged_values[name])

    assert len(set(expected)) > 1
    assert values.tolist() == pytest.approx(expected, rel=2e-6, abs=1e-7)

    # Averaging rounds the models of several clients. Those of nobody and of one client are exact.
    is_exact = MASKS.sum(1) < 2
    expected_values = torch.tensor(expected, dtype=values.dtype)
    assert torch.equal(values[is_exact], expected_values[is_exact])


class LossGrowsWithEachCall(VAE):
    """Its loss is random, and grows with each call."""

    num_losses = 0

    def loss(self, batch):
        self.num_losses += 1
        return self.num_losses * super().loss(batch)


class CallsAfterRound(L.Callback):
    """Calls a function of the Trainer and of the module when a round has ended."""

    def __init__(self, function):
        self.function = function

    def on_train_epoch_end(self, trainer, pl_module):
        self.result = self.function(trainer, pl_module)


def call_after_round(function, folder, kind):
    """What the function returns after a round."""
    callback = CallsAfterRound(function)
    fit(
        FederatedLoop(seed=3),
        folder,
        module=kind(),
        data=partition_in_three(kind.data()),
        rounds=1,
        callbacks=[callback],
        limit_val_batches=2,
    )
    return callback.result


def make_evaluator(trainer, module, **options):
    batches = store_batches(trainer, trainer.datamodule.val_dataloader())
    return ValidatedModels(trainer, ParameterSpace(module), batches, names=["val_loss"], **options)


def test_equal_models_have_equal_logged_values_at_any_position(tmp_path):
    def evaluate_four_models(trainer, module):
        evaluate = make_evaluator(trainer, module)
        model = evaluate.space.read(module)
        models = torch.stack([model, 0.5 * model, 2 * model, model])
        third_model_alone = models[2:3]
        losses = evaluate(models).value("val_loss")
        loss_of_third = evaluate(third_model_alone).value("val_loss")
        return losses, loss_of_third

    losses, loss_of_third = call_after_round(evaluate_four_models, tmp_path, LossGrowsWithEachCall)

    assert losses[0] == losses[3]
    assert losses[2] == loss_of_third[0]
    assert len(set(losses.tolist())) == 3


def test_evaluation_of_logged_values_changes_neither_module_nor_trainer(tmp_path):
    def evaluate_and_compare(trainer, module):
        evaluate = make_evaluator(trainer, module)
        model = evaluate.space.read(module)
        generator_state = torch.get_rng_state()
        logged_values = dict(trainer.callback_metrics)

        evaluate(2 * model[None])

        assert torch.equal(evaluate.space.read(module), model)
        assert torch.equal(torch.get_rng_state(), generator_state)
        assert dict(trainer.callback_metrics) == logged_values
        assert module.trainer is trainer
        assert trainer.training

    call_after_round(evaluate_and_compare, tmp_path, LossGrowsWithEachCall)


class RepeatsFirstBatch:
    """A loader that never ends."""

    def __init__(self, loader):
        self.loader = loader

    def __iter__(self):
        return itertools.repeat(next(iter(self.loader)))


def test_endless_validation_loader_is_stored_up_to_the_trainers_limit(tmp_path):
    def store_endless_loader(trainer, module):
        endless = RepeatsFirstBatch(trainer.datamodule.val_dataloader())
        return [len(batches) for batches in store_batches(trainer, endless)]

    assert call_after_round(store_endless_loader, tmp_path, VAE) == [2]


STEP = 1e-2


@pytest.mark.fast_rows
@pytest.mark.parametrize("kind", [Autoencoder, LanguageModel, SeveralLoaders])
def test_gradient_of_a_logged_value_equals_difference_quotients(kind, tmp_path):
    def compare_with_quotients(trainer, module):
        evaluate = make_evaluator(trainer, module, derived=["val_loss"])
        evaluate.dry_run()
        model = evaluate.space.read(module)
        gradient = evaluate.gradient(model, "val_loss")

        assert gradient.shape == (evaluate.space.num_parameters,)
        assert gradient.dtype == torch.float64

        for direction in (gradient, torch.randn_like(gradient)):
            unit = direction / direction.norm()
            step = torch.zeros_like(model)
            step[: len(gradient)] = STEP * unit
            low, high = evaluate(torch.stack([model - step, model + step])).value("val_loss")
            quotient = float(high - low) / (2 * STEP)
            assert quotient == pytest.approx(float(gradient @ unit), rel=2e-2, abs=2e-4)

    call_after_round(compare_with_quotients, tmp_path, kind)


class LogsPythonNumber(LanguageModel):
    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch).item())


class DoublesLossInEpochHook(LanguageModel):
    factor = 1.0

    def on_validation_epoch_start(self):
        self.factor = 2.0

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.factor * self.loss(batch))


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (LogsPythonNumber, "without its autograd graph"),
        (DoublesLossInEpochHook, "hooks around the step contribute to"),
    ],
)
def test_loss_without_a_computable_gradient_is_refused_before_training(tmp_path, kind, words):
    loop = FederatedLoop(metrics={"g": GradientShapley(loss="val_loss")}, seed=3)

    with refused(words) as caught:
        fit(loop, tmp_path, kind(), partition_in_three(kind.data()), rounds=1)

    assert "metric 'g'" in str(caught.value)


class ScoresByStoredBatches(Plain):
    """Its validation compares a batch with the last training batch, and fails without one."""

    def __init__(self):
        super().__init__()
        self.stored: list[Any] = []

    def training_step(self, batch, batch_idx):
        self.stored.append(batch[0].mean())
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        if not self.stored:
            raise ValueError("Embedding store is empty")
        self.log("distance", (batch[0].mean() - self.stored[-1]).abs())


def test_module_that_cannot_validate_untrained_is_refused_with_its_error(tmp_path):
    metric = PartialFederatedShapley(performance="distance", mode="min")
    loop = FederatedLoop(metrics={"value": metric})

    message = "value.*copy of the untrained ScoresByStoredBatches is validated.*ValueError: Embedding store is empty"
    with refused(message):
        fit(loop, tmp_path, ScoresByStoredBatches(), toy_data(server_val=0.2))


class SavesItsBias(Plain):
    """Saves its last bias after each validation, into a folder of its Trainer."""

    def __init__(self, folder_of):
        super().__init__()
        self.folder_of = folder_of

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val_loss", torch.nn.functional.cross_entropy(self(x), y))

    def on_validation_epoch_end(self):
        folder = Path(self.folder_of(self.trainer))
        folder.mkdir(parents=True, exist_ok=True)
        torch.save(self.net[-1].bias.detach(), folder / "bias.pt")


@pytest.mark.slow
@pytest.mark.parametrize(
    "folder_of",
    [
        pytest.param(lambda trainer: trainer.log_dir, id="trainer"),
        pytest.param(lambda trainer: trainer.logger.log_dir, id="logger"),
        pytest.param(lambda trainer: trainer.checkpoint_callback.dirpath, id="checkpoints"),
    ],
)
def test_validation_hook_may_write_into_folders_that_the_trainer_names(folder_of, tmp_path):
    metric = PartialFederatedShapley(performance="val_loss", mode="min")
    loop = FederatedLoop(metrics={"value": metric}, seed=1)

    module = fit(
        loop,
        tmp_path,
        SavesItsBias(folder_of),
        toy_data(server_val=0.2),
        rounds=1,
        logger=CSVLogger(tmp_path / "logs"),
        enable_checkpointing=True,
    )

    # Scored models leave nothing there, and Lightning's own validation leaves the run's model.
    saved_files = list(tmp_path.rglob("bias.pt"))
    assert len(saved_files) == 1
    assert torch.equal(torch.load(saved_files[0]), module.net[-1].bias)
    assert loop.contributions["value"].isfinite().all()
