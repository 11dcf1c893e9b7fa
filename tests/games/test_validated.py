"""The utility of any task: what a module logs when it validates, compared with Lightning's own validation."""

import copy
import itertools
from pathlib import Path

import pytest
import torch
from games.all_coalitions import (
    MASKS,
    partition_in_three,
    play_all_coalitions,
    validate_with_lightning,
)
from lightning.pytorch.callbacks import LambdaCallback
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
from zoo.program import Base
from zoo.tasks import VAE, Autoencoder, Hooked, LanguageModel, Regression, SeveralLoaders


@pytest.mark.by_turn
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
    expected_values = torch.tensor(expected, dtype=values.dtype)
    torch.testing.assert_close(values, expected_values, rtol=2e-6, atol=1e-7)

    # The models of nobody and of one client are no averages, which would be rounded.
    is_no_average = MASKS.sum(dim=1) < 2
    assert torch.equal(values[is_no_average], expected_values[is_no_average])


class LossGrowsWithEachCall(VAE):
    """Its loss is random, and grows with each call."""

    num_losses = 0

    def loss(self, batch):
        self.num_losses += 1
        return self.num_losses * super().loss(batch)


VAL_BATCHES = 2


def fit_and_call_after_the_round(folder, kind, function):
    """Call a function of the Trainer and the module after the only round of a fit."""
    fit(
        FederatedLoop(seed=3),
        folder,
        module=kind(),
        data=partition_in_three(kind.data()),
        rounds=1,
        callbacks=[LambdaCallback(on_train_epoch_end=function)],
        limit_val_batches=VAL_BATCHES,
    )


def make_evaluator(trainer, module, **options):
    batches = store_batches(trainer, trainer.datamodule.val_dataloader())
    return ValidatedModels(trainer, ParameterSpace(module), batches, names=["val_loss"], **options)


def assert_losses_do_not_depend_on_positions(trainer, module):
    evaluate = make_evaluator(trainer, module)
    model = evaluate.space.read(module)
    models = torch.stack([model, 0.5 * model, 2 * model, model])

    losses = evaluate(models).value("val_loss").tolist()
    (loss_of_third_alone,) = evaluate(models[2:3]).value("val_loss").tolist()

    assert losses[0] == losses[3]
    assert losses[2] == loss_of_third_alone
    num_different_models = 3
    assert len(set(losses)) == num_different_models


def test_equal_models_have_equal_logged_values_at_any_position(tmp_path):
    fit_and_call_after_the_round(
        tmp_path, LossGrowsWithEachCall, assert_losses_do_not_depend_on_positions
    )


def assert_evaluation_changes_nothing(trainer, module):
    evaluate = make_evaluator(trainer, module)
    model = evaluate.space.read(module)
    another_model = 2 * model
    generator_state = torch.get_rng_state()
    logged_values = dict(trainer.callback_metrics)

    evaluate(another_model[None])

    assert torch.equal(evaluate.space.read(module), model)
    assert torch.equal(torch.get_rng_state(), generator_state)
    assert dict(trainer.callback_metrics) == logged_values
    assert module.trainer is trainer
    assert trainer.training


def test_evaluation_of_logged_values_changes_neither_module_nor_trainer(tmp_path):
    fit_and_call_after_the_round(tmp_path, LossGrowsWithEachCall, assert_evaluation_changes_nothing)


class RepeatsFirstBatch:
    """A loader that never ends."""

    def __init__(self, loader):
        self.first_batch = next(iter(loader))

    def __iter__(self):
        return itertools.repeat(self.first_batch)


def assert_endless_loader_is_stored_up_to_the_limit(trainer, module):
    endless_loader = RepeatsFirstBatch(trainer.datamodule.val_dataloader())

    (stored_batches,) = store_batches(trainer, endless_loader)

    assert len(stored_batches) == VAL_BATCHES


def test_endless_validation_loader_is_stored_up_to_the_trainers_limit(tmp_path):
    fit_and_call_after_the_round(tmp_path, VAE, assert_endless_loader_is_stored_up_to_the_limit)


def slope_by_differences(evaluate, model, direction, step_size=1e-2):
    """Return the slope of the loss at a model along a direction of its parameters of length 1."""
    step = torch.zeros_like(model)
    step[: len(direction)] = step_size * direction
    neighbors = torch.stack([model - step, model + step])
    low, high = evaluate(neighbors).value("val_loss").tolist()
    return (high - low) / (2 * step_size)


def assert_gradient_has_slopes_by_differences(trainer, module):
    evaluate = make_evaluator(trainer, module, derived=["val_loss"])
    evaluate.dry_run()
    model = evaluate.space.read(module)

    gradient = evaluate.gradient(model, "val_loss")

    assert gradient.shape == (evaluate.space.num_parameters,)
    assert gradient.dtype == torch.float64
    for direction in (gradient, torch.randn_like(gradient)):
        unit_direction = direction / direction.norm()
        expected_slope = slope_by_differences(evaluate, model, unit_direction)
        slope = float(gradient @ unit_direction)
        assert slope == pytest.approx(expected_slope, rel=2e-2, abs=2e-4)


class WithUnusedLayer(Autoencoder):
    def __init__(self):
        super().__init__()
        self.unused = torch.nn.Linear(2, 2)


@pytest.mark.fast_rows
@pytest.mark.parametrize("kind", [WithUnusedLayer, LanguageModel, SeveralLoaders])
def test_gradient_of_a_logged_value_equals_difference_quotients(kind, tmp_path):
    fit_and_call_after_the_round(tmp_path, kind, assert_gradient_has_slopes_by_differences)


class LogsPythonNumber(LanguageModel):
    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch).item())


class DoublesLossInEpochHook(LanguageModel):
    factor = 1.0

    def on_validation_epoch_start(self):
        self.factor = 2.0

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.factor * self.loss(batch))


@pytest.mark.fast_rows
@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (LogsPythonNumber, "without its autograd graph"),
        (DoublesLossInEpochHook, "hooks around the step contribute to"),
    ],
)
def test_loss_without_a_computable_gradient_is_refused_before_training(tmp_path, kind, words):
    loop = FederatedLoop(metrics={"g": GradientShapley(loss="val_loss")}, seed=3)

    with refused(f"metric 'g'.*{words}"):
        fit(loop, tmp_path, kind(), partition_in_three(kind.data()), rounds=1)


class ScoresByStoredBatch(Plain):
    """Its validation compares a batch with the last training batch, and fails without one."""

    mean_of_last_batch = None

    def training_step(self, batch, batch_idx):
        x, _ = batch
        self.mean_of_last_batch = x.mean()
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        if self.mean_of_last_batch is None:
            raise ValueError("no batch is stored")
        x, _ = batch
        self.log("distance", (x.mean() - self.mean_of_last_batch).abs())


def test_module_that_cannot_validate_untrained_is_refused_with_its_error(tmp_path):
    metric = PartialFederatedShapley(performance="distance", mode="min")
    loop = FederatedLoop(metrics={"value": metric})

    failing_step = "copy of the untrained ScoresByStoredBatch is validated"
    with refused(f"value.*{failing_step}.*ValueError: no batch is stored"):
        fit(loop, tmp_path, ScoresByStoredBatch(), toy_data(server_val=0.2))


class SavesItsBias(Base):
    """Saves its last bias after each validation, into a folder of its Trainer."""

    def __init__(self, folder_of):
        super().__init__()
        self.folder_of = folder_of

    def on_validation_epoch_end(self):
        folder = Path(self.folder_of(self.trainer))
        folder.mkdir(parents=True, exist_ok=True)
        torch.save(self.net[-1].bias.detach(), folder / "bias.pt")


@pytest.mark.by_turn
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
