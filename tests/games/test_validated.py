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
from helpers import make_generator, refused
from helpers.data import toy_data
from helpers.fits import fit
from helpers.models import Plain
from zoo.tasks import (
    VAE,
    Autoencoder,
    Hooked,
    LanguageModel,
    Regression,
    SeveralLoaders,
)

#: Beside the kinds of ``tests/compat/kinds.py``, whose values are also those that a Trainer logs.
LOGGED = [
    (Regression, "val_worst", "min"),
    (Regression, "val_total", "min"),
    (Regression, "val_odd", "max"),
    (Hooked, "val_loss_epoch", "min"),
    (Hooked, "best", "min"),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "name", "mode"),
    LOGGED,
    ids=[f"{kind.__name__}-{name}" for kind, name, _ in LOGGED],
)
def test_a_logged_value_is_what_lightning_would_log(tmp_path, kind, name, mode):
    torch.manual_seed(1)
    module = kind()
    untrained = copy.deepcopy(module)  # its Python state is that of the first round's game
    rounds = 1 if kind is Hooked else 2
    values, vectors = play_all_coalitions(
        tmp_path,
        module,
        partition_in_three(kind.data()),
        rounds,
        performance=name,
        mode=mode,
    )
    sign = -1 if mode == "min" else 1
    logged = [
        validate_with_lightning(untrained, vector, kind.data(), tmp_path)[name]
        for vector in vectors
    ]
    expected = [sign * value for value in logged]

    assert len(set(expected)) > 1

    expected_values = torch.tensor(expected, dtype=torch.float64)
    torch.testing.assert_close(values, expected_values, rtol=2e-6, atol=1e-7)

    # Where the vector is the same to the bit, the value is, too: nobody, and one client alone.
    same = [row for row, mask in enumerate(MASKS) if mask.sum() < 2]
    assert values[same].tolist() == [expected[row] for row in same]


class CountsLosses(VAE):
    """Its loss is random, and grows with each call."""

    num_losses = 0

    def loss(self, batch) -> torch.Tensor:
        self.num_losses += 1
        return self.num_losses * super().loss(batch)


SCALES = (1.0, 0.5, 2.0, 1.0)  # the first and the last model are equal


def test_equal_models_have_equal_logged_values_at_any_position(tmp_path):
    module = CountsLosses()
    data = partition_in_three(VAE.data())
    results = {}

    class Probe(L.Callback):
        def on_train_epoch_end(self, trainer, pl_module):
            class Endless:
                def __iter__(self):
                    return itertools.repeat(next(iter(data.val_dataloader())))

            endless = store_batches(trainer, Endless())
            assert [len(loader) for loader in endless] == [trainer.limit_val_batches]

            space = ParameterSpace(pl_module)
            batches = store_batches(trainer, data.val_dataloader())
            evaluate = ValidatedModels(trainer, space, batches, names=["val_loss"])
            model = space.read(pl_module)
            vectors = torch.stack([model * scale for scale in SCALES])

            state_before = copy.deepcopy(pl_module.state_dict())
            generator_state_before = torch.get_rng_state()
            logged_before = dict(trainer.callback_metrics)

            third_vector_alone = vectors[2:3]
            results["values"] = evaluate(vectors).value("val_loss")
            results["value of the third alone"] = evaluate(third_vector_alone).value("val_loss")

            for name, value in pl_module.state_dict().items():
                assert torch.equal(value, state_before[name])
            assert torch.equal(torch.get_rng_state(), generator_state_before)
            assert dict(trainer.callback_metrics) == logged_before
            assert pl_module.trainer is trainer
            assert trainer.training

    loop = FederatedLoop(seed=3)
    fit(
        loop,
        tmp_path,
        module,
        data,
        rounds=1,
        callbacks=[Probe()],
        limit_val_batches=2,
    )

    values = results["values"]
    assert values[0] == values[3]  # of equal models
    assert values[2] == results["value of the third alone"][0]
    assert len(set(values.tolist())) == 3


@pytest.mark.fast_rows
@pytest.mark.parametrize("kind", [Autoencoder, LanguageModel, SeveralLoaders])
def test_gradient_of_a_logged_value_equals_difference_quotients(tmp_path, kind):
    class Probe(L.Callback):
        def on_train_epoch_end(self, trainer, module):
            space = ParameterSpace(module)
            batches = store_batches(trainer, data.val_dataloader())
            evaluate = ValidatedModels(
                trainer,
                space,
                batches,
                names=["val_loss"],
                derived=["val_loss"],
            )
            evaluate.dry_run()
            model = space.read(module)
            gradient = evaluate.gradient(model, "val_loss")

            assert gradient.shape == (space.num_parameters,)
            assert gradient.dtype == torch.float64

            seeded = make_generator(1)
            another = torch.randn(len(gradient), generator=seeded).double()
            for direction in (gradient, another):
                unit = direction / direction.norm()
                step = torch.zeros_like(model)
                step[: len(gradient)] = 1e-2 * unit.to(model)
                low, high = evaluate(torch.stack([model - step, model + step])).value("val_loss")
                slope = float(gradient @ unit)
                quotient = float(high - low) / (2 * 1e-2)
                assert quotient == pytest.approx(slope, rel=2e-2, abs=2e-4)

    data = partition_in_three(kind.data())
    loop = FederatedLoop(seed=3)
    fit(loop, tmp_path, kind(), data, rounds=1, callbacks=[Probe()])


class Detached(LanguageModel):
    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch).item())


class Twice(LanguageModel):
    factor = 1.0

    def on_validation_epoch_start(self):
        self.factor = 2.0

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.factor * self.loss(batch))


@pytest.mark.parametrize(
    ("kind", "words"),
    [(Detached, "without its autograd graph"), (Twice, "hooks around the step contribute to")],
)
def test_loss_without_a_computable_gradient_is_refused_before_training(tmp_path, kind, words):
    loop = FederatedLoop(metrics={"g": GradientShapley(loss="val_loss")}, seed=3)

    with refused(words) as caught:
        fit(loop, tmp_path, kind(), partition_in_three(kind.data()), rounds=1)

    assert "metric 'g'" in str(caught.value)


class Bank(Plain):
    """It scores by what training has stored."""

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


def test_module_that_cannot_validate_untrained_is_refused_with_what_was_done(tmp_path):
    metric = PartialFederatedShapley(performance="distance", mode="min")
    loop = FederatedLoop(metrics={"value": metric})

    message = "value.*copy of the untrained Bank is validated.*ValueError: Embedding store is empty"
    with refused(message):
        fit(loop, tmp_path, Bank(), toy_data(server_val=0.2))


class SavesItsBias(Plain):
    """Saves its last bias after each validation, into a folder that its Trainer names."""

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
        logger=CSVLogger(tmp_path / "logs"),
        enable_checkpointing=True,
    )

    # Scored models leave nothing there, and Lightning's own validation leaves the run's model.
    (file,) = tmp_path.rglob("bias.pt")
    assert torch.equal(torch.load(file), module.net[-1].bias)
    assert loop.contributions["value"].isfinite().all()
